// Communicator: collectives between ranks. Reductions run in a fixed order: equal bits on all ranks and in
// all runs.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph/types.h"

namespace ONNXDDP_API onnxddp {

class Store;

/// Collectives on host memory. Every call blocks the calling thread, has the communicator's deadline, and
/// throws PeerError when a peer is gone or late. Calls must be made in the same order by all ranks, from one
/// thread at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Sum over ranks, in place. f32, f64, i64.
  virtual void all_reduce(void* data, std::size_t count, DType dtype) = 0;
  /// `bytes` of every rank, concatenated in rank order into `out` (size*bytes).
  virtual void all_gather(const void* data, std::size_t bytes, void* out) = 0;
  /// `in` has size*count elements; rank r receives the sum of block r (count elements).
  virtual void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) = 0;
  virtual void broadcast(void* data, std::size_t bytes, int root) = 0;
  virtual void barrier() = 0;

  /// The training step that the next collectives belong to; for heartbeats and messages only. Any thread.
  virtual void note_step(std::int64_t /*step*/) {}
  /// Makes the running collective, and every later one, throw PeerError(reason). Any thread, also during a
  /// collective.
  virtual void abort(const std::string& /*reason*/) {}
};

/// A peer failed, or did not arrive in time: exit code 3. The message names the rank, step and collective
/// where known.
class PeerError : public Error {
 public:
  explicit PeerError(const std::string& message) : Error(message, kExitPeer) {}
};

struct CommunicatorOptions {
  std::string backend = "auto";  // auto (size 1: solo; all on one machine: shm; else gloo) | shm | gloo
  int rank = 0, size = 1;
  Store* store = nullptr;  // rendezvous and heartbeats; outlives the communicator
  std::chrono::milliseconds timeout{120'000};
  std::string host = "127.0.0.1";  // gloo: numeric address of this machine that the other ranks reach
  std::chrono::milliseconds heartbeat{
      500};  // between signs of life in the store; 0: none, and no diagnosis of failures
};
/// The only place that knows which back ends exist.
std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options);

/// Runs `body(communicator)` on `size` ranks that are threads of this process and returns when all are done;
/// the first exception is rethrown after every thread has ended (a throwing rank makes the others'
/// collectives throw).
void run_ranks(int size, const std::function<void(Communicator&)>& body,
               std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace onnxddp

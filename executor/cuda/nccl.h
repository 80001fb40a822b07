// Collectives between GPUs by NCCL: a Communicator whose pointers are device memory, and the same calls queued on a stream.
//
// One communicator a process, all calls in one order on all ranks, one GPU a process. Graphs that hold its collectives are
// destroyed before it. pin_nccl_environment() fixes what makes sums repeat their bits: NCCL_ALGO=Ring, NCCL_PROTO=Simple,
// NCCL_NVLS_ENABLE=0; a variable that the user has set stays.
#pragma once

#include <nccl.h>

#include <mutex>

#include "distributed/communicator.h"
#include "executor/cuda/runtime.h"

namespace onnxddp::cuda {

/// Before the first communicator of the process, and before other threads read the environment.
void pin_nccl_environment();

/// Every wait has the deadline of the options and ends early when a peer's failure is seen or abort() is called; it then throws
/// PeerError that names rank and operation, and so does every later call. One thread queues and waits; abort() from any.
class NcclCommunicator : public Communicator {
 public:
  /// Meets the other ranks through options.store (not needed for size 1). `stream`: where the blocking calls queue their work.
  NcclCommunicator(const CommunicatorOptions& options, cudaStream_t stream);
  ~NcclCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  /// Queue and wait. Device memory; f32, bf16, f64, i64 and i32.
  void all_reduce(void* data, std::size_t count, DType dtype) override;
  void all_gather(const void* data, std::size_t bytes, void* out) override;
  void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) override;
  void broadcast(void* data, std::size_t bytes, int root) override;
  void barrier() override;
  void abort(const std::string& reason) override;

  /// Queue only, also while `stream` is captured.
  void queue_all_reduce(void* data, std::size_t count, DType dtype, cudaStream_t stream);
  void queue_all_gather(const void* data, std::size_t bytes, void* out, cudaStream_t stream);
  void queue_reduce_scatter(const void* in, std::size_t count, DType dtype, void* out, cudaStream_t stream);
  void queue_broadcast(void* data, std::size_t bytes, int root, cudaStream_t stream);
  /// Waits for everything on `stream`, as cudaStreamSynchronize would, but with the deadline and an eye on the peers.
  void wait(cudaStream_t stream);

 private:
  void join(const CommunicatorOptions& options);
  template <class Call>
  void issue(std::string operation, const Call& call);
  void settle(ncclResult_t result);
  ncclResult_t state();
  [[noreturn]] void fail(const std::string& what);
  void leave() noexcept;

  int rank_, size_;
  std::chrono::milliseconds timeout_;
  cudaStream_t stream_;
  std::string operation_ = "joining";  // the last one issued
  std::mutex mutex_;                   // guards the two below
  ncclComm_t comm_ = nullptr;          // null: failed or aborted
  std::string failure_;
  DeviceMemory word_;                  // of barrier()
};

}  // namespace onnxddp::cuda

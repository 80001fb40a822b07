// Device: memory, streams of the three lanes, events.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "graph/op.h"

namespace ONNXDDP_API onnxddp {

struct KernelTable;

/// Opaque position in a lane's queue.
struct Event {
  std::uint64_t ticket = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;           // "cpu, 2 threads"
  virtual std::string kind() const = 0;           // cpu | cuda | cudaemu
  virtual void* allocate(std::size_t bytes) = 0;  // 64-byte aligned, zero-filled
  virtual void free(void* memory) = 0;
  /// Host <-> device.
  virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;
  virtual const KernelTable& kernels() const = 0;
  virtual int threads() const = 0;
  /// Calls `body`; kernels that it prepares or runs queue their work on this lane.
  virtual void on_lane(Lane /*lane*/, const std::function<void()>& body) { body(); }
};

/// The host. `threads`: per rank, for the loops of its kernels.
std::unique_ptr<Device> make_cpu_device(int threads);

}  // namespace onnxddp

// Owners of CUDA's streams, events, graphs and memory, and the device of the executor. Objects belong to the
// device that was current when they were made; a process uses one device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "executor/device.h"

namespace onnxddp::cuda {

class Blas;
class ConvPlanCache;
class Cudnn;

/// Sole owner of a handle, which `Destroy` gives back (its status does not matter: there is nobody to tell).
template <class Handle, auto Destroy>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Handle handle) : handle_(handle) {}
  ~Owned() { reset(); }
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Handle get() const { return handle_; }
  /// For functions that make the handle.
  Handle* out() {
    reset();
    return &handle_;
  }
  void reset() {
    if (handle_ != nullptr) (void)Destroy(handle_);
    handle_ = nullptr;
  }

 private:
  Handle handle_ = nullptr;
};

/// A position in a stream that other streams, or the host, can wait for.
class StreamEvent {
 public:
  explicit StreamEvent(bool timing = false);
  cudaEvent_t get() const { return event_.get(); }
  void record(cudaStream_t stream);
  /// The host waits.
  void synchronize() const;
  /// Milliseconds since `start`; both have timing and have been reached.
  float milliseconds_since(const StreamEvent& start) const;

 private:
  Owned<cudaEvent_t, cudaEventDestroy> event_;
};

/// A queue of work that waits for no other one by itself.
class Stream {
 public:
  explicit Stream(bool high_priority = false);
  cudaStream_t get() const { return stream_.get(); }
  /// Everything queued later waits for what `event` marks.
  void wait(const StreamEvent& event);
  void synchronize() const;

 private:
  Owned<cudaStream_t, cudaStreamDestroy> stream_;
};

/// Work that was recorded once and is queued as a whole. Must die before a communicator whose collectives it
/// holds.
class WorkGraph {
 public:
  /// Records what `body` queues on `stream`, and on streams that it makes wait for it and joins again.
  /// Thread-local mode: other threads may use CUDA meanwhile. Nothing runs. If body throws, the recording is
  /// dropped.
  static WorkGraph capture(cudaStream_t stream, const std::function<void()>& body);
  void launch(cudaStream_t stream) const;

 private:
  Owned<cudaGraphExec_t, cudaGraphExecDestroy> exec_;
};

/// Device memory, 256-byte aligned, not initialised.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes);
  void* get() const { return memory_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  std::size_t bytes() const { return bytes_; }

 private:
  Owned<void*, cudaFree> memory_;
  std::size_t bytes_ = 0;
};

/// Host memory that asynchronous copies need. The host may touch it when the copy's stream has been waited
/// for.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  /// mapped: kernels may write it, and the host may poll it meanwhile (heartbeat words).
  explicit PinnedMemory(std::size_t bytes, bool mapped = false);
  void* get() const { return memory_.get(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  std::size_t bytes() const { return bytes_; }

 private:
  Owned<void*, cudaFreeHost> memory_;
  std::size_t bytes_ = 0;
};

/// Where kernels of the table queue their work: a stream and what belongs to it.
struct Lane {
  cudaStream_t stream = nullptr;
  Blas* blas = nullptr;
  Cudnn* cudnn = nullptr;
  ConvPlanCache* plans = nullptr;
  unsigned long long* fault = nullptr;  // FaultWord (kernels.h) of the device
};
/// The lane of this thread's innermost LaneScope; InternalError without one.
const Lane& current_lane();
/// `prepare` and `run` of the module's kernels are called inside of one.
class LaneScope {
 public:
  explicit LaneScope(const Lane& lane);
  ~LaneScope();
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;

 private:
  Lane lane_;
  const Lane* outer_;
};

/// Number of usable devices; 0 with the reason when the driver is missing, too old, or finds none.
int device_count(std::string* reason);

/// One GPU: memory, the streams of the three lanes, handles. kind(): as given, "cuda" or "cudaemu".
class CudaDevice : public Device {
 public:
  CudaDevice(std::string kind, int index);
  ~CudaDevice() override;

  std::string name() const override;
  std::string kind() const override { return kind_; }
  void* allocate(std::size_t bytes) override;
  void free(void* memory) override;
  /// Both wait for all work queued so far, then copy.
  void upload(void* device, const void* host, std::size_t bytes) override;
  /// Throws Error if work since the last download met a label or an index that is out of range.
  void download(void* host, const void* device, std::size_t bytes) override;
  const KernelTable& kernels() const override;
  int threads() const override { return 1; }
  void on_lane(onnxddp::Lane lane, const std::function<void()>& body) override;

  Stream& compute() { return compute_; }
  Stream& comm() { return comm_; }          ///< high priority
  Stream& transfer() { return transfer_; }  ///< host to device
  /// The compute lane with its handles; convolution plans and the fault word are the device's.
  Lane lane() const;

 private:
  void check_fault();

  std::string kind_, title_;
  int index_;
  Stream compute_, comm_, transfer_;
  std::unique_ptr<Blas> blas_;
  std::unique_ptr<Cudnn> cudnn_;
  std::unique_ptr<ConvPlanCache> plans_;
  DeviceMemory fault_;
};

}  // namespace onnxddp::cuda

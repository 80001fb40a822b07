#include "executor/cuda/runtime.h"

#include <algorithm>

#include "executor/cuda/blas.h"
#include "executor/cuda/conv.h"
#include "executor/cuda/kernel_table.h"
#include "executor/cuda/kernels.h"
#include "executor/cuda/status.h"

namespace onnxddp::cuda {
namespace {

thread_local const Lane* innermost_lane = nullptr;

/// Makes the device current before the members that need it.
int select_device(int index) {
  CUDA_OK(cudaSetDevice(index));
  return index;
}

}  // namespace

StreamEvent::StreamEvent(bool timing) {
  CUDA_OK(cudaEventCreateWithFlags(event_.out(), timing ? cudaEventDefault : cudaEventDisableTiming));
}
void StreamEvent::record(cudaStream_t stream) { CUDA_OK(cudaEventRecord(event_.get(), stream)); }
void StreamEvent::synchronize() const { CUDA_OK(cudaEventSynchronize(event_.get())); }
float StreamEvent::milliseconds_since(const StreamEvent& start) const {
  float result = 0;
  CUDA_OK(cudaEventElapsedTime(&result, start.get(), event_.get()));
  return result;
}

Stream::Stream(bool high_priority) {
  int least = 0, greatest = 0;  // the greatest priority is the smallest number
  CUDA_OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_OK(
      cudaStreamCreateWithPriority(stream_.out(), cudaStreamNonBlocking, high_priority ? greatest : least));
}
void Stream::wait(const StreamEvent& event) { CUDA_OK(cudaStreamWaitEvent(stream_.get(), event.get(), 0)); }
void Stream::synchronize() const { CUDA_OK(cudaStreamSynchronize(stream_.get())); }

WorkGraph WorkGraph::capture(cudaStream_t stream, const std::function<void()>& body) {
  Owned<cudaGraph_t, cudaGraphDestroy> graph;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    body();
  } catch (...) {
    (void)cudaStreamEndCapture(stream, graph.out());
    (void)cudaGetLastError();
    throw;
  }
  CUDA_OK(cudaStreamEndCapture(stream, graph.out()));
  WorkGraph result;
  CUDA_OK(cudaGraphInstantiate(result.exec_.out(), graph.get(), 0));
  return result;
}
void WorkGraph::launch(cudaStream_t stream) const { CUDA_OK(cudaGraphLaunch(exec_.get(), stream)); }

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  CUDA_OK(cudaMalloc(memory_.out(), std::max<std::size_t>(bytes, 1)));
}

PinnedMemory::PinnedMemory(std::size_t bytes, bool mapped) : bytes_(bytes) {
  CUDA_OK(cudaHostAlloc(memory_.out(), std::max<std::size_t>(bytes, 1),
                        mapped ? cudaHostAllocMapped : cudaHostAllocDefault));
}

const Lane& current_lane() {
  CHECK(innermost_lane != nullptr, "a kernel of the CUDA module outside of a LaneScope");
  return *innermost_lane;
}
LaneScope::LaneScope(const Lane& lane) : lane_(lane), outer_(innermost_lane) { innermost_lane = &lane_; }
LaneScope::~LaneScope() { innermost_lane = outer_; }

int device_count(std::string* reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  if (reason != nullptr) *reason = status == cudaSuccess ? "the driver finds no device" : status_text(status);
  if (status != cudaSuccess) (void)cudaGetLastError();
  return 0;
}

CudaDevice::CudaDevice(std::string kind, int index)
    : kind_(std::move(kind)), index_(select_device(index)), comm_(true), fault_(sizeof(FaultWord)) {
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, index));
  title_ = properties.name;
  blas_ = std::make_unique<Blas>(compute_.get());
  cudnn_ = std::make_unique<Cudnn>(compute_.get());
  plans_ = std::make_unique<ConvPlanCache>();
  CUDA_OK(cudaMemsetAsync(fault_.get(), 0xFF, fault_.bytes(), transfer_.get()));
  transfer_.synchronize();
}
CudaDevice::~CudaDevice() = default;

std::string CudaDevice::name() const { return cat(kind_, ":", index_, ", ", title_); }

void* CudaDevice::allocate(std::size_t bytes) {
  void* memory = nullptr;
  CUDA_OK(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)));
  CUDA_OK(cudaMemsetAsync(memory, 0, bytes, transfer_.get()));
  transfer_.synchronize();
  return memory;
}
void CudaDevice::free(void* memory) { CUDA_OK(cudaFree(memory)); }

void CudaDevice::upload(void* device, const void* host, std::size_t bytes) {
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, transfer_.get()));
  transfer_.synchronize();
}
void CudaDevice::download(void* host, const void* device, std::size_t bytes) {
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, transfer_.get()));
  transfer_.synchronize();
  check_fault();
}
void CudaDevice::check_fault() {
  FaultWord found = 0;
  CUDA_OK(cudaMemcpyAsync(&found, fault_.get(), sizeof found, cudaMemcpyDeviceToHost, transfer_.get()));
  transfer_.synchronize();
  if (found == ~FaultWord{0}) return;
  CUDA_OK(cudaMemsetAsync(fault_.get(), 0xFF, fault_.bytes(), transfer_.get()));
  transfer_.synchronize();
  throw Error(cat("a label or an index is out of range: ", static_cast<std::int32_t>(found & 0xFFFFFFFFu),
                  " at position ", found >> 32, " of its tensor"))
      .hint("--device cpu names the tensor and the range");
}

const KernelTable& CudaDevice::kernels() const { return cuda_kernels(); }
Lane CudaDevice::lane() const {
  return {compute_.get(), blas_.get(), cudnn_.get(), plans_.get(), fault_.as<FaultWord>()};
}
void CudaDevice::on_lane(onnxddp::Lane lane, const std::function<void()>& body) {
  Lane own = this->lane();
  if (lane == onnxddp::Lane::comm) own = {comm_.get()};
  if (lane == onnxddp::Lane::copy) own = {transfer_.get()};
  const LaneScope scope(own);
  body();
}

}  // namespace onnxddp::cuda

#include "executor/cuda/nccl.h"

#include <cstdlib>
#include <cstring>
#include <thread>

#include "distributed/store.h"
#include "executor/cuda/status.h"

namespace onnxddp::cuda {
namespace {

using Clock = std::chrono::steady_clock;

/// Between two looks: none at first, so that a short wait stays short.
class Pause {
 public:
  void operator()() {
    if (++looks_ > 200) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  int looks_ = 0;
};

ncclDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f32: return ncclFloat32;
    case DType::bf16: return ncclBfloat16;
    case DType::f64: return ncclFloat64;
    case DType::i64: return ncclInt64;
    case DType::i32: return ncclInt32;
    default: CHECK(false, "a sum over ranks of ", dtype_name(dtype));
  }
}

/// The id of a communicator, from rank 0 to all.
ncclUniqueId exchange_id(const CommunicatorOptions& options) {
  ncclUniqueId id{};
  if (options.rank == 0) CUDA_OK(ncclGetUniqueId(&id));
  if (options.size == 1) return id;
  CHECK(options.store != nullptr, "ranks of several processes need a store");
  // Every rank makes its communicators in the same order.
  const std::string key = cat("nccl/", options.store->add(cat("nccl/count/", options.rank), 1));
  if (options.rank == 0) {
    options.store->set(key, std::string(id.internal, sizeof id.internal));
    return id;
  }
  const std::string text = options.store->get(key, options.timeout);
  CHECK(text.size() == sizeof id.internal, "the id of a communicator has ", text.size(), " bytes");
  std::memcpy(id.internal, text.data(), sizeof id.internal);
  return id;
}

}  // namespace

void pin_nccl_environment() {
  ::setenv("NCCL_ALGO", "Ring", 0);
  ::setenv("NCCL_PROTO", "Simple", 0);
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
}

NcclCommunicator::NcclCommunicator(const CommunicatorOptions& options, cudaStream_t stream)
    : rank_(options.rank),
      size_(options.size),
      timeout_(options.timeout),
      stream_(stream),
      word_(sizeof(float)) {
  CHECK(size_ >= 1 && rank_ >= 0 && rank_ < size_, rank_, " of ", size_);
  CUDA_OK(cudaMemsetAsync(word_.get(), 0, word_.bytes(), stream_));
  join(options);
}

void NcclCommunicator::join(const CommunicatorOptions& options) {
  const ncclUniqueId id = exchange_id(options);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.commName = "onnx-ddp";
  ncclResult_t result;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    result = ncclCommInitRankConfig(&comm_, size_, id, rank_, &config);
  }
  if (result != ncclInProgress) CUDA_OK(result);
  settle(result);
}

NcclCommunicator::~NcclCommunicator() { leave(); }

void NcclCommunicator::leave() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr) return;
  const Clock::time_point deadline = Clock::now() + std::min(timeout_, std::chrono::milliseconds(5000));
  ncclResult_t now = ncclCommFinalize(comm_);
  Pause pause;
  while (now == ncclInProgress && Clock::now() < deadline) {
    pause();
    if (ncclCommGetAsyncError(comm_, &now) != ncclSuccess) now = ncclInternalError;
  }
  if (now == ncclSuccess)
    (void)ncclCommDestroy(comm_);
  else
    (void)ncclCommAbort(comm_);
  comm_ = nullptr;
}

/// The communicator's own opinion; an earlier failure comes as an exception.
ncclResult_t NcclCommunicator::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr) throw PeerError(failure_);
  ncclResult_t now = ncclSuccess;
  const ncclResult_t result = ncclCommGetAsyncError(comm_, &now);
  return result != ncclSuccess ? result : now;
}

void NcclCommunicator::abort(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr) return;
  failure_ = reason;
  (void)ncclCommAbort(comm_);
  comm_ = nullptr;
}

void NcclCommunicator::fail(const std::string& what) {
  abort(cat("rank ", rank_, " of ", size_, ": ", operation_, ": ", what));
  const std::lock_guard<std::mutex> lock(mutex_);
  throw PeerError(failure_);
}

/// Waits until a call on the non-blocking communicator has been taken.
void NcclCommunicator::settle(ncclResult_t result) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  Pause pause;
  while (result == ncclInProgress) {
    if (Clock::now() > deadline) fail(cat("no answer from the other ranks within ", timeout_.count(), " ms"));
    pause();
    result = state();
  }
  if (result != ncclSuccess) fail(status_text(result));
}

template <class Call>
void NcclCommunicator::issue(std::string operation, const Call& call) {
  operation_ = std::move(operation);
  ncclResult_t result;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) throw PeerError(failure_);
    result = call(comm_);
  }
  settle(result);
}

void NcclCommunicator::queue_all_reduce(void* data, std::size_t count, DType dtype, cudaStream_t stream) {
  issue(cat("all-reduce of ", count, " ", dtype_name(dtype)), [&](ncclComm_t comm) {
    return ncclAllReduce(data, data, count, data_type(dtype), ncclSum, comm, stream);
  });
}
void NcclCommunicator::queue_all_gather(const void* data, std::size_t bytes, void* out, cudaStream_t stream) {
  issue(cat("all-gather of ", bytes, " bytes"),
        [&](ncclComm_t comm) { return ncclAllGather(data, out, bytes, ncclUint8, comm, stream); });
}
void NcclCommunicator::queue_reduce_scatter(const void* in, std::size_t count, DType dtype, void* out,
                                            cudaStream_t stream) {
  issue(cat("reduce-scatter of ", count, " ", dtype_name(dtype)), [&](ncclComm_t comm) {
    return ncclReduceScatter(in, out, count, data_type(dtype), ncclSum, comm, stream);
  });
}
void NcclCommunicator::queue_broadcast(void* data, std::size_t bytes, int root, cudaStream_t stream) {
  issue(cat("broadcast of ", bytes, " bytes from rank ", root),
        [&](ncclComm_t comm) { return ncclBroadcast(data, data, bytes, ncclUint8, root, comm, stream); });
}

void NcclCommunicator::wait(cudaStream_t stream) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  Pause pause;
  for (;;) {
    const cudaError_t done = cudaStreamQuery(stream);
    if (done == cudaSuccess) break;
    if (done != cudaErrorNotReady) fail(status_text(done));
    (void)cudaGetLastError();
    const ncclResult_t now = state();
    if (now != ncclSuccess && now != ncclInProgress) fail(status_text(now));
    if (Clock::now() > deadline) fail(cat("not done after ", timeout_.count(), " ms"));
    pause();
  }
  if (const ncclResult_t now = state(); now != ncclSuccess && now != ncclInProgress) fail(status_text(now));
}

void NcclCommunicator::all_reduce(void* data, std::size_t count, DType dtype) {
  queue_all_reduce(data, count, dtype, stream_);
  wait(stream_);
}
void NcclCommunicator::all_gather(const void* data, std::size_t bytes, void* out) {
  queue_all_gather(data, bytes, out, stream_);
  wait(stream_);
}
void NcclCommunicator::reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) {
  queue_reduce_scatter(in, count, dtype, out, stream_);
  wait(stream_);
}
void NcclCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  queue_broadcast(data, bytes, root, stream_);
  wait(stream_);
}
void NcclCommunicator::barrier() {
  queue_all_reduce(word_.get(), 1, DType::f32, stream_);
  wait(stream_);
}

}  // namespace onnxddp::cuda

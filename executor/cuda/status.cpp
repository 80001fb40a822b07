#include "executor/cuda/status.h"

#include <string_view>

#include "distributed/communicator.h"

namespace onnxddp::cuda {
namespace {

/// "cudaMalloc(&p, n)" -> "cudaMalloc".
std::string function_name(const char* call) {
  const std::string_view text(call);
  return std::string(text.substr(0, text.find('(')));
}

std::string place(const char* file, int line) {
  const std::string_view path(file);
  const std::size_t from = path.rfind("executor/");
  return cat(from == std::string_view::npos ? path : path.substr(from), ":", line);
}

[[noreturn]] void throw_other(const std::string& text, const char* call, const char* file, int line) {
  throw Error(cat(function_name(call), " failed: ", text)).at(place(file, line));
}

[[noreturn]] void throw_memory(const char* call, const char* file, int line) {
  throw Error(cat(function_name(call), ": the device has too little free memory"))
      .at(place(file, line))
      .hint("a smaller --batch, --accumulate more, or another device");
}

/// What the library noted about its last failure in this thread; empty if nothing.
std::string cudnn_details() {
  char text[512] = "";
  cudnnGetLastErrorString(text, sizeof text);
  return text;
}

}  // namespace

std::string status_text(cudaError_t status) {
  return cat(cudaGetErrorName(status), " (", static_cast<int>(status), "): ", cudaGetErrorString(status));
}
std::string status_text(cublasStatus_t status) {
  return cat("cuBLAS status ", static_cast<int>(status), ": ", cublasGetStatusString(status));
}
std::string status_text(cudnnStatus_t status) {
  return cat("cuDNN status ", static_cast<int>(status), ": ", cudnnGetErrorString(status));
}
std::string status_text(ncclResult_t status) {
  return cat("NCCL status ", static_cast<int>(status), ": ", ncclGetErrorString(status));
}

void throw_status(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaErrorMemoryAllocation) throw_memory(call, file, line);
  throw_other(status_text(status), call, file, line);
}

void throw_status(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw_memory(call, file, line);
  throw_other(status_text(status), call, file, line);
}

void throw_status(cudnnStatus_t status, const char* call, const char* file, int line) {
  if (status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED) throw_memory(call, file, line);
  const std::string details = cudnn_details();
  throw_other(cat(status_text(status), details.empty() ? "" : "; ", details), call, file, line);
}

void throw_status(ncclResult_t status, const char* call, const char* file, int line) {
  const std::string text = cat(function_name(call), " failed: ", status_text(status));
  if (status == ncclInvalidArgument || status == ncclInvalidUsage) throw Error(text).at(place(file, line));
  throw PeerError(text);
}

}  // namespace onnxddp::cuda

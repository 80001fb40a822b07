// The one place that turns the statuses of CUDA, cuBLAS, cuDNN and NCCL into exceptions.
//   CUDA_OK(cudaStreamSynchronize(stream));
// Running out of device memory is an Error with a hint, a failed collective a PeerError, everything else an Error that names
// the call, the status and the source line.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cudnn_graph.h>
#include <nccl.h>

#include "graph/error.h"

namespace onnxddp::cuda {

/// Text of a status: its name and what it means.
std::string status_text(cudaError_t status);
std::string status_text(cublasStatus_t status);
std::string status_text(cudnnStatus_t status);
std::string status_text(ncclResult_t status);

[[noreturn]] void throw_status(cudaError_t status, const char* call, const char* file, int line);
[[noreturn]] void throw_status(cublasStatus_t status, const char* call, const char* file, int line);
[[noreturn]] void throw_status(cudnnStatus_t status, const char* call, const char* file, int line);
[[noreturn]] void throw_status(ncclResult_t status, const char* call, const char* file, int line);

/// All four libraries call success 0.
template <class Status>
void check_status(Status status, const char* call, const char* file, int line) {
  if (static_cast<int>(status) != 0) throw_status(status, call, file, line);
}

}  // namespace onnxddp::cuda

/// Throws unless the call of CUDA, cuBLAS, cuDNN or NCCL succeeds.
#define CUDA_OK(call) ::onnxddp::cuda::check_status((call), #call, __FILE__, __LINE__)

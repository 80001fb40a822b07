// The error path of launch(), kept out of the .cu files so that nvcc does not compile graph/error.h.
#include "executor/cuda/launch.h"

#include "graph/error.h"

namespace onnxddp {

void launch_failed(const char* kernel, cudaError_t error) {
  throw InternalError(cat("CUDA kernel '", kernel, "' could not be launched: ", cudaGetErrorName(error), " (",
                          cudaGetErrorString(error), ")"));
}

}  // namespace onnxddp

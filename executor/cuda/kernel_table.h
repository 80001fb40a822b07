// Kernels of the CUDA module by op. Their prepare and run are called inside of a LaneScope (runtime.h): run queues its work on
// that lane's stream and returns.
#pragma once

#include "executor/kernel.h"

namespace onnxddp::cuda {

const KernelTable& cuda_kernels();

}  // namespace onnxddp::cuda

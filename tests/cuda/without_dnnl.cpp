// In place of executor/cpu/dnnl.cpp where oneDNN is not at hand (scripts/gpu_check.sh): it has no
// implementation of anything, and the CPU's kernels are the plain loops.
#include "executor/cpu/kernels.h"

namespace onnxddp::cpu {

Run dnnl_matmul(PlanContext& /*context*/) { return {}; }
Run dnnl_gemm(PlanContext& /*context*/, bool /*bias*/) { return {}; }
Run dnnl_conv(PlanContext& /*context*/) { return {}; }
Run dnnl_conv_data_grad(PlanContext& /*context*/) { return {}; }
Run dnnl_conv_weight_grad(PlanContext& /*context*/) { return {}; }

}  // namespace onnxddp::cpu

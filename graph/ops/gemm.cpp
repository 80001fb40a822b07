#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> gemm_ops() { return {}; }

}  // namespace onnxddp

#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> elementwise_ops() { return {}; }

}  // namespace onnxddp

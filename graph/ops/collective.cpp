#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> collective_ops() { return {}; }

}  // namespace onnxddp

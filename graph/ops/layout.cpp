#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> layout_ops() { return {}; }

}  // namespace onnxddp

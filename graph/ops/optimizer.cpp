#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> optimizer_ops() { return {}; }

}  // namespace onnxddp

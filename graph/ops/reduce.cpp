#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> reduce_ops() { return {}; }

}  // namespace onnxddp

#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> conv_ops() { return {}; }

}  // namespace onnxddp

#include "graph/ops/families.h"

namespace onnxddp {

std::span<const OpDef> index_ops() { return {}; }

}  // namespace onnxddp

#include "graph/names.h"

namespace onnxddp {

void claim_name(Graph& graph, const std::string& name) {
  const ValueId holder = graph.find(name);
  if (!holder) return;
  const Kind kind = graph.value(holder).kind;
  if (kind != Kind::computed && kind != Kind::constant)
    throw Error(cat("the model's tensor '", name, "' has a name that training needs for itself"))
        .hint("rename it in the model");
  graph.rename(holder, graph.unique_name(name));
}

}  // namespace onnxddp

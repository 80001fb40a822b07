// guard: gradient norm and clipping, after the reduction, on every rank alike (no communication).
#include "graph/builder.h"
#include "graph/passes/passes.h"

namespace onnxddp {

void guard(Graph& graph, const GuardOptions& options) {
  const auto grads = gradients(graph);
  if (grads.empty()) return;
  Builder builder(graph);
  std::vector<ValueId> values;
  for (const auto& [param, gradient] : grads) values.push_back(gradient);
  const ValueId squares = builder.emit("SumSquares", values, {}, {graph.unique_name("grad_norm.squared")})[0];
  const Expr norm = builder.call("Sqrt", {builder.expr(squares)}, {}, graph.unique_name("grad_norm"));
  graph.outputs.push_back({"grad_norm", norm.id()});
  Expr factor;
  if (options.clip_norm > 0) {
    builder.set_hint("clip");
    factor = call("Clip", {options.clip_norm / (norm + 1e-6)}, {{"max", 1.0}});
  }
  for (const auto& [param, gradient] : grads) {
    builder.set_hint(graph.value(param).name + ".clipped");
    Expr clipped = builder.expr(gradient);
    if (factor) clipped = clipped * factor;
    if (options.clip_value > 0)
      clipped = call("Clip", {clipped}, {{"min", -options.clip_value}, {"max", options.clip_value}});
    set_gradient(graph, param, clipped.id());
  }
}

}  // namespace onnxddp

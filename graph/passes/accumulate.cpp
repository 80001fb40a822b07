// accumulate: micro-batches add their gradients (and loss) into states; the last one joins them to its own.
#include "graph/builder.h"
#include "graph/passes/passes.h"

namespace onnxddp {
namespace {

constexpr std::string_view kAccSuffix = ".acc";

/// The state that collects `value` under `name`, shaped like it.
ValueId accumulator(Graph& graph, const std::string& name, ValueId value) {
  return graph.add_param(name + std::string(kAccSuffix), graph.value(value).type, Kind::state);
}

ValueId loss_of(const Graph& graph) {
  for (const Output& output : graph.outputs)
    if (output.name == "loss") return output.value;
  throw InternalError("the graph has no output 'loss'");
}

void set_output(Graph& graph, std::string_view name, ValueId value) {
  for (Output& output : graph.outputs)
    if (output.name == name) output.value = value;
}

}  // namespace

void accumulate_micro(Graph& graph) {
  Builder builder(graph);
  const auto collect = [&](const std::string& name, ValueId value) {
    const ValueId state = accumulator(graph, name, value);
    const std::string next = graph.value(state).name + ".next";
    graph.updates.push_back({state, builder.emit("Add", {state, value}, {}, {next})[0]});
  };
  for (const auto& [param, gradient] : gradients(graph)) {
    const std::string name = graph.value(param).name;
    collect(name, gradient);
    std::erase_if(graph.outputs, [&](const Output& o) { return o.name == name + ".grad"; });
  }
  collect("loss", loss_of(graph));
}

void accumulate_step(Graph& graph) {
  Builder builder(graph);
  const auto join = [&](const std::string& name, ValueId value) {
    const ValueId state = accumulator(graph, name, value);
    const ValueId total = builder.emit("Add", {state, value}, {}, {graph.value(state).name + ".total"})[0];
    const Expr zero = expand(builder.scalar(graph.value(value).type.dtype, 0), graph.value(value).type.shape);
    graph.updates.push_back({state, zero.id()});
    return total;
  };
  for (const auto& [param, gradient] : gradients(graph)) {
    builder.set_hint(graph.value(param).name + ".zero");
    set_gradient(graph, param, join(graph.value(param).name, gradient));
  }
  builder.set_hint("loss.zero");
  set_output(graph, "loss", join("loss", loss_of(graph)));
}

}  // namespace onnxddp

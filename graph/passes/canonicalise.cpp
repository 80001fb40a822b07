// canonicalise: one form per op before anything else looks at the graph.
#include <unordered_map>

#include "graph/op.h"
#include "graph/passes/passes.h"

namespace onnxddp {
namespace {

/// A whole-number value whose contents are known becomes a constant: shape arithmetic disappears from the
/// graph.
void materialise_known_contents(Graph& graph) {
  std::vector<std::pair<ValueId, ValueId>> replaced;
  for (NodeId id : graph.order) {
    for (ValueId output : graph.node(id).outputs) {
      const Value& value = graph.value(output);
      if (!value.ints || !is_static(value.type.shape)) continue;
      const TensorType type = value.type;
      const Dims contents = *value.ints;
      replaced.emplace_back(output, graph.add_constant(value.name + ".value", type, contents));
    }
  }
  for (const auto& [from, to] : replaced) graph.replace_uses(from, to);
}

class Expander {
 public:
  explicit Expander(Graph& graph) : graph_(graph) {}

  void run() {
    const std::vector<NodeId> old = std::move(graph_.order);
    graph_.order.clear();
    for (NodeId id : old) visit(id);
    for (Output& output : graph_.outputs) output.value = mapped(output.value);
    for (Update& update : graph_.updates) update.next = mapped(update.next);
  }

 private:
  ValueId mapped(ValueId id) const {
    const auto at = replaced_.find(id);
    return at == replaced_.end() ? id : at->second;
  }

  void visit(NodeId id) {
    for (ValueId& input : graph_.node(id).inputs) input = mapped(input);
    const OpDef& op = *graph_.node(id).op;
    if (gradient_kind(op) != GradientKind::decomposition) {
      graph_.order.push_back(id);
      return;
    }
    CHECK(op.decompose, op.name, " has no decomposition");
    std::vector<NodeId> body;
    Builder builder(graph_, body);
    const Node node = graph_.node(id);  // a copy: the builder adds nodes
    builder.set_origin(node.origin);
    builder.set_hint(graph_.value(node.outputs[0]).name + ".t");
    Compose compose(builder, node);
    const int first_new = static_cast<int>(graph_.value_count());
    op.decompose(compose);
    for (std::size_t i = 0; i < node.outputs.size(); ++i) {
      const ValueId result = compose.results()[i];
      if (!result) continue;
      replaced_[node.outputs[i]] = result;
      if (result.index >= first_new) take_name(node.outputs[i], result);
    }
    for (NodeId inner : body) visit(inner);  // bodies may hold composed ops themselves
    for (std::size_t i = 0; i < node.outputs.size(); ++i) {
      const auto at = replaced_.find(node.outputs[i]);
      if (at != replaced_.end()) at->second = mapped(at->second);
    }
  }

  /// A value that the decomposition made takes the name that the model's author knows.
  void take_name(ValueId from, ValueId to) {
    if (graph_.value(to).kind != Kind::computed) return;
    const std::string name = graph_.value(from).name;
    graph_.rename(from, graph_.unique_name(name + ".old"));
    graph_.rename(to, name);
  }

  Graph& graph_;
  std::unordered_map<ValueId, ValueId> replaced_;
};

}  // namespace

void canonicalise(Graph& graph) {
  materialise_known_contents(graph);
  Expander(graph).run();
  remove_dead(graph);
}

}  // namespace onnxddp

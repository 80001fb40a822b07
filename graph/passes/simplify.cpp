// simplify: dead nodes, constants, identities, equal nodes. One walk; never moves or merges collectives or
// random ops.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "graph/op.h"
#include "graph/passes/passes.h"
#include "graph/text.h"

namespace onnxddp {

void remove_dead(Graph& graph) {
  std::vector<bool> live(graph.value_count());
  const auto mark = [&](ValueId id) {
    if (id) live[static_cast<std::size_t>(id.index)] = true;
  };
  for (const Output& output : graph.outputs) mark(output.value);
  for (const Update& update : graph.updates) {
    mark(update.param);
    mark(update.next);
  }
  std::vector<NodeId> kept;
  for (auto at = graph.order.rbegin(); at != graph.order.rend(); ++at) {
    const Node& node = graph.node(*at);
    const bool used = std::any_of(node.outputs.begin(), node.outputs.end(),
                                  [&](ValueId id) { return live[static_cast<std::size_t>(id.index)]; });
    if (!used) continue;
    for (ValueId input : node.inputs) mark(input);
    kept.push_back(*at);
  }
  std::reverse(kept.begin(), kept.end());
  graph.order = std::move(kept);
  std::erase_if(graph.constants, [&](ValueId id) { return !live[static_cast<std::size_t>(id.index)]; });
}

namespace {

bool is_scalar_constant(const Graph& graph, ValueId id, double wanted) {
  const Value& value = graph.value(id);
  return value.data && value.data->numel() == 1 && value.data->as_double(0) == wanted;
}

/// The input that the node passes through unchanged, or kNone.
ValueId passes_through(const Graph& graph, const Node& node) {
  const std::string& op = node.op->name;
  if (node.inputs.empty() || node.outputs.size() != 1) return kNone;
  const ValueId x = node.inputs[0];
  if (!x) return kNone;
  const bool same_type = graph.value(x).type == graph.value(node.outputs[0]).type;
  if (op == "Identity") return x;
  if (!same_type) return kNone;
  if (op == "Reshape" || op == "Expand" || op == "Cast" || op == "SumTo") return x;
  if (op == "Transpose") {
    const Ints& perm = std::get<Ints>(node.attrs.at("perm"));
    return std::is_sorted(perm.begin(), perm.end()) ? x : kNone;
  }
  if ((op == "Mul" || op == "Div") && is_scalar_constant(graph, node.inputs[1], 1)) return x;
  if (op == "Concat" && node.inputs.size() == 1) return x;
  return kNone;
}

class Simplifier {
 public:
  Simplifier(Graph& graph, const Evaluator& evaluate) : graph_(graph), evaluate_(evaluate) {}

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
    Node& node = graph_.node(id);
    for (ValueId& input : node.inputs) input = mapped(input);
    merge_reshapes(node);
    if (const ValueId source = passes_through(graph_, node)) {
      replaced_[node.outputs[0]] = source;
      return;
    }
    const Traits& traits = node.op->traits;
    if (!traits.random && !traits.collective) {
      if (fold(id)) return;
      if (const NodeId same = equal_node(id)) {
        for (std::size_t i = 0; i < node.outputs.size(); ++i)
          replaced_[node.outputs[i]] = graph_.node(same).outputs[i];
        return;
      }
    }
    graph_.order.push_back(id);
  }

  /// Reshape(Reshape(x)) reads x.
  void merge_reshapes(Node& node) {
    if (node.op->name != "Reshape") return;
    const NodeId producer = graph_.value(node.inputs[0]).producer;
    if (producer && graph_.node(producer).op->name == "Reshape")
      node.inputs[0] = graph_.node(producer).inputs[0];
  }

  bool fold(NodeId id) {
    if (!evaluate_) return false;
    const Node& node = graph_.node(id);
    if (node.inputs.empty()) return false;
    for (ValueId input : node.inputs)
      if (input && !graph_.value(input).data) return false;
    for (ValueId output : node.outputs)
      if (!is_static(graph_.value(output).type.shape)) return false;
    std::vector<HostTensor> results = evaluate_(graph_, id);
    const std::vector<ValueId> outputs = node.outputs;
    for (std::size_t i = 0; i < outputs.size(); ++i)
      replaced_[outputs[i]] =
          graph_.add_constant(graph_.value(outputs[i]).name + ".value", std::move(results[i]));
    return true;
  }

  NodeId equal_node(NodeId id) {
    const Node& node = graph_.node(id);
    std::string key = node.op->name;
    for (ValueId input : node.inputs) key += cat(' ', input.index);
    for (const auto& [name, attr] : node.attrs) key += cat(' ', name, '=', attr_str(attr));
    const auto [at, is_new] = seen_.emplace(std::move(key), id);
    if (is_new || graph_.node(at->second).outputs.size() < node.outputs.size()) return {};
    return at->second;
  }

  Graph& graph_;
  const Evaluator& evaluate_;
  std::unordered_map<ValueId, ValueId> replaced_;
  std::unordered_map<std::string, NodeId> seen_;
};

}  // namespace

void simplify(Graph& graph, const Evaluator& evaluate) {
  remove_dead(graph);
  Simplifier(graph, evaluate).run();
  remove_dead(graph);
}

}  // namespace onnxddp

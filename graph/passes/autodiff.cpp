// autodiff: reverse-mode differentiation as a graph rewrite. Rules know nothing of accumulation, broadcasting
// or who needs a gradient; all of that is here.
#include <algorithm>
#include <set>
#include <unordered_map>

#include "graph/op.h"
#include "graph/passes/passes.h"
#include "graph/text.h"

namespace onnxddp {
namespace {

constexpr std::string_view kGradSuffix = ".grad";

/// What has arrived so far for one value.
struct Contributions {
  std::vector<ValueId> whole;
  std::vector<Gradient::Piece> pieces;
};

class Autodiff {
 public:
  Autodiff(Graph& graph, ValueId loss) : graph_(graph), loss_(loss), builder_(graph) {}

  void run() {
    const std::vector<NodeId> forward = graph_.order;
    find_dependents(forward);
    CHECK(depends_.size() >= static_cast<std::size_t>(loss_.index));
    builder_.set_hint(graph_.value(loss_).name + ".seed");
    pending_[loss_].whole.push_back(builder_.scalar(graph_.value(loss_).type.dtype, 1.0).id());
    for (auto at = forward.rbegin(); at != forward.rend(); ++at) visit(*at);
    report_blocked();
    finish();
  }

 private:
  bool depends(ValueId id) const {
    return id && static_cast<std::size_t>(id.index) < depends_.size() &&
           depends_[static_cast<std::size_t>(id.index)];
  }

  /// Which values depend on a parameter through floats: gradients of others are dead before they are made.
  void find_dependents(const std::vector<NodeId>& forward) {
    depends_.assign(graph_.value_count(), false);
    for (ValueId id : graph_.params)
      if (graph_.value(id).kind == Kind::param) depends_[static_cast<std::size_t>(id.index)] = true;
    for (NodeId id : forward) {
      const Node& node = graph_.node(id);
      if (!std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId in) { return depends(in); }))
        continue;
      for (ValueId output : node.outputs)
        if (is_float(graph_.value(output).type.dtype))
          depends_[static_cast<std::size_t>(output.index)] = true;
    }
  }

  void visit(NodeId id) {
    const Node node = graph_.node(id);  // a copy: rules add nodes
    bool reached = false;
    for (ValueId output : node.outputs) reached = reached || (depends(output) && pending_.count(output) > 0);
    if (!reached) return;
    const GradientKind kind = gradient_kind(*node.op);
    if (kind == GradientKind::zero) return;
    if (kind == GradientKind::none) {
      block(id);
      return;
    }
    std::vector<ValueId> dys;
    for (ValueId output : node.outputs) dys.push_back(pending_.count(output) > 0 ? total(output) : kNone);
    const std::string hint = graph_.value(node.outputs[0]).name + ".bw";
    builder_.set_hint(hint);
    builder_.set_origin(node.origin);
    const int first_new = static_cast<int>(graph_.value_count());
    Gradient gradient(builder_, node, std::move(dys));
    node.op->gradient(gradient);
    for (const Gradient::Piece& piece : gradient.results()) contribute(node, piece, first_new);
  }

  void contribute(const Node& node, const Gradient::Piece& piece, int first_new) {
    const ValueId input = node.inputs[piece.input];
    if (!depends(input)) return;
    Contributions& pending = pending_[input];
    if (!piece.whole) {
      pending.pieces.push_back(piece);
      return;
    }
    const TensorType type = graph_.value(input).type;
    const Expr value = sum_to(piece.value, type.shape);
    CHECK(value.type() == type, node.op->name, " gradient of input ", piece.input, " is ", value.type().str(),
          ", not ", type.str());
    pending.whole.push_back(value.id());
    // A value made by this rule takes its role as a name; one that passes through keeps the name it has.
    if (value.id().index >= first_new && graph_.value(value.id()).kind == Kind::computed)
      graph_.rename(value.id(), graph_.unique_name(graph_.value(input).name + std::string(kGradSuffix)));
  }

  /// The accumulated gradient of a value: pieces are assembled once, then everything is added in order of
  /// arrival.
  ValueId total(ValueId id) {
    Contributions& pending = pending_.at(id);
    const std::string name = graph_.value(id).name;
    if (!pending.pieces.empty()) {
      pending.whole.push_back(assemble(id, pending.pieces));
      pending.pieces.clear();
    }
    while (pending.whole.size() > 1) {
      const bool last = pending.whole.size() == 2;
      const std::string role = cat(name, kGradSuffix, last ? ".sum" : ".part");
      pending.whole[1] =
          builder_.emit("Add", {pending.whole[0], pending.whole[1]}, {}, {graph_.unique_name(role)})[0];
      pending.whole.erase(pending.whole.begin());
    }
    return pending.whole[0];
  }

  ValueId assemble(ValueId id, const std::vector<Gradient::Piece>& pieces) {
    const Shape shape = graph_.value(id).type.shape;
    const std::string name = graph_.unique_name(graph_.value(id).name + std::string(kGradSuffix));
    Dims starts;
    Ints steps;
    std::vector<ValueId> inputs;
    for (const Gradient::Piece& piece : pieces) {
      Dims start(shape.size(), Dim(0));
      Ints step(shape.size(), 1);
      for (std::size_t i = 0; i < piece.axes.size(); ++i) {
        const auto axis = static_cast<std::size_t>(piece.axes[i]);
        start[axis] = piece.starts[i];
        step[axis] = piece.steps[i];
      }
      starts.insert(starts.end(), start.begin(), start.end());
      steps.insert(steps.end(), step.begin(), step.end());
      inputs.push_back(piece.value.id());
    }
    return builder_.emit("SumPieces", inputs,
                         {{"shape", make_attr(shape)}, {"starts", make_attr(starts)}, {"steps", steps}},
                         {name})[0];
  }

  void block(NodeId id) {
    std::set<ValueId> seen;
    std::vector<ValueId> open = graph_.node(id).inputs;
    while (!open.empty()) {
      const ValueId value = open.back();
      open.pop_back();
      if (!depends(value) || !seen.insert(value).second) continue;
      if (graph_.value(value).kind == Kind::param) blocked_.emplace(value, id);
      const NodeId producer = graph_.value(value).producer;
      if (producer)
        open.insert(open.end(), graph_.node(producer).inputs.begin(), graph_.node(producer).inputs.end());
    }
  }

  /// A parameter that is reachable only through an op without a gradient is an error; with another path it is
  /// trained by that one alone, which would be silently wrong, so it is an error as well.
  void report_blocked() const {
    if (blocked_.empty()) return;
    const NodeId op = blocked_.begin()->second;
    std::string names;
    int count = 0;
    for (const auto& [param, node] : blocked_)
      if (++count <= 3) names += cat(names.empty() ? "" : ", ", graph_.value(param).name);
    if (count > 3) names += cat(" and ", count - 3, " more");
    throw Error(cat("op ", graph_.node(op).op->name,
                    " has no gradient, and parameters are reached through it: ", names))
        .at(dump_node(graph_, op))
        .in(graph_.node(op).origin)
        .hint(
            "freeze these parameters with --freeze REGEX, or put the loss before this op with --loss-input");
  }

  void finish() {
    for (ValueId id : std::vector<ValueId>(graph_.params)) {
      if (graph_.value(id).kind != Kind::param || pending_.count(id) == 0) continue;
      builder_.set_origin({});
      graph_.outputs.push_back({graph_.value(id).name + std::string(kGradSuffix), total(id)});
    }
  }

  Graph& graph_;
  ValueId loss_;
  Builder builder_;
  std::vector<bool> depends_;
  std::unordered_map<ValueId, Contributions> pending_;
  std::map<ValueId, NodeId> blocked_;
};

}  // namespace

std::vector<std::pair<ValueId, ValueId>> gradients(const Graph& graph) {
  std::vector<std::pair<ValueId, ValueId>> out;
  for (const Output& output : graph.outputs) {
    if (!output.name.ends_with(kGradSuffix)) continue;
    const ValueId param = graph.find(output.name.substr(0, output.name.size() - kGradSuffix.size()));
    if (param && graph.value(param).kind == Kind::param) out.emplace_back(param, output.value);
  }
  std::unordered_map<int, std::size_t> position;
  for (std::size_t i = 0; i < graph.order.size(); ++i) position[graph.order[i].index] = i + 1;
  std::stable_sort(out.begin(), out.end(), [&](const auto& a, const auto& b) {
    return position[graph.value(a.second).producer.index] < position[graph.value(b.second).producer.index];
  });
  return out;
}

void set_gradient(Graph& graph, ValueId param, ValueId gradient) {
  const std::string name = graph.value(param).name + std::string(kGradSuffix);
  for (Output& output : graph.outputs) {
    if (output.name != name) continue;
    output.value = gradient;
    return;
  }
  throw InternalError(cat("no gradient of '", graph.value(param).name, "'"));
}

void autodiff(Graph& graph, const std::string& loss) {
  for (const Output& output : graph.outputs) {
    if (output.name != loss) continue;
    CHECK(graph.value(output.value).type.shape.empty(), "loss is not a scalar");
    Autodiff(graph, output.value).run();
    remove_dead(graph);
    return;
  }
  throw InternalError(cat("the graph has no output '", loss, "'"));
}

}  // namespace onnxddp

// attach_loss: a loss is a sum over elements and a count of them; the mean's denominator is a state scalar,
// so that one graph serves any number of ranks and micro-batches.
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include "graph/builder.h"
#include "graph/names.h"
#include "graph/nearest.h"
#include "graph/op.h"
#include "graph/passes/options.h"

namespace onnxddp {
namespace {

struct LossContext {
  Graph& graph;
  Builder& builder;
  Expr y;  // the model's output
  const OptionReader& options;
  TensorType target_type;
  std::string target_name;
  std::vector<std::string>& notes;

  // To fill in.
  Expr target, sum, count, correct;
  Dim static_count;

  Expr add_target() { return target = {builder, graph.add_input(target_name, target_type)}; }
  template <class... Ts>
  [[noreturn]] void mismatch(const Ts&... parts) const {
    throw Error(cat(parts...))
        .at(cat("output ", graph.value(y.id()).name, ": ", y.type().str(), ", targets: ", target_type.str()))
        .hint("for class labels save whole numbers (y.astype(numpy.int64)) and use --loss cross_entropy");
  }
};

struct LossDef {
  std::string name, help;
  std::vector<std::string> options;
  bool needs_target = true;
  std::function<void(LossContext&)> build;
};

void mse(LossContext& c) {
  if (c.target_type.dtype != c.y.dtype() || c.target_type.shape != c.y.shape())
    c.mismatch("the loss mse (the default for float targets) needs targets of the output's type and shape");
  const Expr difference = c.y - c.add_target();
  c.sum = reduce_sum(difference * difference, {}, false);
  c.static_count = numel(c.y.shape());
}

/// The class axis is the one whose removal turns the output's shape into the target's: axis 1 first, then the
/// last.
std::int64_t class_axis(LossContext& c) {
  const auto fits = [&](std::int64_t axis) {
    Shape rest = c.y.shape();
    rest.erase(rest.begin() + axis);
    return rest == c.target_type.shape;
  };
  const auto rank = static_cast<std::int64_t>(c.y.rank());
  if (rank < 1) c.mismatch("cross_entropy needs an output with a class axis");
  if (c.options.has("axis")) {
    const std::int64_t axis = normal_axis(c.options.integer("axis", 1), c.y.rank());
    if (!fits(axis))
      c.mismatch("cross_entropy: without axis ", axis, " the output does not have the target's shape");
    return axis;
  }
  const bool second = rank > 1 && fits(1);
  const bool last = fits(rank - 1);
  if (second && last && rank > 2)
    c.notes.emplace_back("cross_entropy: axis 1 and the last axis both fit; axis 1 is the class axis");
  if (second) return 1;
  if (last) return rank - 1;
  c.mismatch("cross_entropy needs class-index targets: the output's shape without its class axis");
}

Ints axes_of(Expr x) {
  Ints axes(x.rank());
  std::iota(axes.begin(), axes.end(), std::int64_t{0});
  return axes;
}

/// Softmax before cross_entropy is skipped: the loss contains it.
void skip_softmax(LossContext& c) {
  const NodeId producer = c.graph.value(c.y.id()).producer;
  if (!producer || c.graph.node(producer).op->name != "Softmax") return;
  c.y = {c.builder, c.graph.node(producer).inputs[0]};
  c.notes.emplace_back("the final Softmax is skipped in training: cross_entropy contains it");
}

void cross_entropy(LossContext& c) {
  if (!is_integer(c.target_type.dtype)) c.mismatch("cross_entropy needs integer targets (class indices)");
  skip_softmax(c);
  const std::int64_t axis = class_axis(c);
  const Expr target = c.add_target();
  Attrs attrs = {{"axis", axis}};
  if (c.options.has("ignore_index")) {
    attrs["ignore_index"] = c.options.integer("ignore_index", -100);
    c.count = c.builder.call(
        "CountTargets", {target},
        {{"ignore_index", attrs["ignore_index"]}, {"to", std::string(dtype_name(c.y.dtype()))}},
        c.graph.unique_name("loss.count"));
  }
  c.sum = c.builder.call("CrossEntropyLoss", {c.y, target}, attrs, c.graph.unique_name("loss.sum"));
  c.static_count = numel(c.target_type.shape);
  c.builder.set_hint("correct.t");
  const Expr classes = c.builder.call("ArgMax", {c.y}, {{"axis", axis}, {"keepdims", std::int64_t{0}}},
                                      c.graph.unique_name("classes"));
  const Expr equal = call("Equal", {classes, cast(target, DType::i64)});
  c.correct = c.builder.call("ReduceSum", {cast(equal, c.y.dtype())},
                             {{"axes", axes_of(equal)}, {"keepdims", std::int64_t{0}}},
                             c.graph.unique_name("correct"));
}

/// The graph's own scalar: weighted by the batch size, so that means over the batch and batch-free terms come
/// out exact over any ranks and micro-batches.
void graph_loss(LossContext& c) {
  if (!(numel(c.y.shape()) == Dim(1)))
    throw Error("--loss graph needs an output with one element")
        .at(cat("output ", c.graph.value(c.y.id()).name, ": ", c.y.type().str()));
  if (c.graph.inputs.empty()) throw Error("--loss graph: the model has no input");
  Dim batch(1);
  for (ValueId input : c.graph.inputs) {
    const Shape& shape = c.graph.value(input).type.shape;
    if (shape.empty() || shape[0].is_constant()) continue;
    batch = shape[0];
    break;
  }
  c.sum = reshape(c.y, {}) * c.builder.dim_scalar(c.y.dtype(), batch);
  c.static_count = batch;
}

const std::vector<LossDef>& losses() {
  static const std::vector<LossDef> table = {
      {"mse", "mean squared error over all elements", {}, true, mse},
      {"cross_entropy",
       "softmax and negative log-likelihood, class-index targets: axis, ignore_index",
       {"axis", "ignore_index"},
       true,
       cross_entropy},
      {"graph", "the model's own output is the loss (one element)", {}, false, graph_loss},
  };
  return table;
}

const LossDef& find_loss(const std::string& name) {
  std::vector<std::string> names;
  std::string list;
  for (const LossDef& def : losses()) {
    if (def.name == name) return def;
    names.push_back(def.name);
    list += (list.empty() ? "" : ", ") + def.name;
  }
  throw usage_error(cat("there is no loss '", name, "'", did_you_mean(name, names)))
      .hint(cat("losses: ", list));
}

ValueId find_input(const Graph& graph, const std::string& name) {
  if (name.empty()) {
    if (graph.outputs.empty()) throw Error("the model has no output to train on");
    return graph.outputs[0].value;
  }
  for (const Output& output : graph.outputs)
    if (output.name == name) return output.value;
  const ValueId id = graph.find(name);
  if (id) return id;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < graph.value_count(); ++i)
    names.push_back(graph.value(ValueId{static_cast<int>(i)}).name);
  throw Error(cat("--loss-input: the model has no tensor '", name, "'", did_you_mean(name, names)));
}

}  // namespace

LossInfo attach_loss(Graph& graph, const std::string& loss, const OptionMap& option_map,
                     const std::string& input, const std::string& target_name, const TensorType& target_type,
                     bool keep_outputs) {
  const LossDef& def = find_loss(loss);
  const OptionReader options(cat("--loss ", loss), option_map);
  options.only(def.options);
  LossInfo info;
  info.name = loss;
  const ValueId y = find_input(graph, input);
  info.input = graph.value(y).name;
  if (!is_float(graph.value(y).type.dtype))
    throw Error(cat("the loss reads '", info.input, "', which is ", graph.value(y).type.str(),
                    ", not a float tensor"))
        .hint("choose another tensor with --loss-input");
  Builder builder(graph);
  builder.set_hint("loss.t");
  LossContext context{
      graph, builder, Expr(builder, y), options, target_type, target_name, info.notes, {}, {}, {}, {}, {}};
  def.build(context);
  if (context.target) info.target = graph.value(context.target.id()).name;
  info.static_count = !context.count;
  info.count = context.static_count;
  if (!keep_outputs) graph.outputs.clear();
  claim_name(graph, "loss.denominator");
  const ValueId denominator = graph.add_param("loss.denominator", {context.sum.dtype(), {}}, Kind::state);
  const Expr mean =
      builder.call("Div", {context.sum, builder.expr(denominator)}, {}, graph.unique_name("loss"));
  graph.outputs.push_back({"loss", mean.id()});
  graph.outputs.push_back({"loss.sum", context.sum.id()});
  if (context.count) graph.outputs.push_back({"loss.count", context.count.id()});
  if (context.correct) graph.outputs.push_back({"correct", context.correct.id()});
  return info;
}

std::string default_loss(const Graph& graph, const std::string& input, const TensorType& target,
                         bool target_is_binary, bool target_is_one_hot, std::vector<std::string>* notes) {
  const Value& value = graph.value(find_input(graph, input));
  const Shape& shape = value.type.shape;
  const auto later = [](const std::string& name) {
    return Error(cat("these targets call for the loss ", name, ", which this version does not have"))
        .hint("choose one with --loss, for example --loss mse");
  };
  const bool no_target = target.shape.empty() && target_is_binary == false && target.dtype == DType::boolean;
  if (no_target && numel(shape) == Dim(1)) return "graph";
  const bool has_classes = std::any_of(shape.begin() + (shape.empty() ? 0 : 1), shape.end(),
                                       [](const Dim& d) { return !d.is_constant() || d.value() >= 2; });
  if (is_integer(target.dtype) && has_classes) return "cross_entropy";
  const bool one_value = shape.size() <= 1 || (shape.size() == 2 && shape.back() == Dim(1));
  if (one_value && target_is_binary) {
    const bool sigmoid = value.producer && graph.node(value.producer).op->name == "Sigmoid";
    throw later(sigmoid ? "bce" : "bce_with_logits");
  }
  if (target_is_one_hot && notes != nullptr)
    notes->emplace_back(
        "the targets look one-hot: class indices with --loss cross_entropy usually train better than mse");
  return "mse";
}

std::vector<std::pair<std::string, std::string>> loss_names() {
  std::vector<std::pair<std::string, std::string>> out;
  for (const LossDef& def : losses()) out.emplace_back(def.name, def.help);
  return out;
}

}  // namespace onnxddp

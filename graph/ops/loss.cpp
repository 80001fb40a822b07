// Losses over index targets, as sums over the kept labels. Means divide by the count of the whole optimizer
// step.
#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

std::vector<AttrSpec> label_specs() { return {{"axis", 1}, {"ignore_index", kNoIgnoredLabel}}; }

Shape without_axis(const Inference& i, std::size_t x) {
  const std::int64_t axis = i.integer("axis");
  i.require(axis >= 0 && axis < static_cast<std::int64_t>(i.rank(x)), "axis ", axis, " is out of range");
  Shape shape = i.shape(x);
  shape.erase(shape.begin() + axis);
  return shape;
}

void label_loss_infer(Inference& i) {
  const Shape labels = without_axis(i, 0);
  i.require(!differ(i.shape(1), labels), "the targets must be ", shape_str(labels), ", not ",
            shape_str(i.shape(1)));
  i.y({i.x(0).dtype, {}});
}

void label_loss_grad_infer(Inference& i) {
  const Shape labels = without_axis(i, 0);
  i.require(!differ(i.shape(1), labels), "the targets must be ", shape_str(labels), ", not ",
            shape_str(i.shape(1)));
  i.require(i.shape(2).empty() && i.x(2).dtype == i.x(0).dtype, "dy must be a scalar of x's type");
  i.y(i.x(0));
}

/// The gradient op is named after the loss.
GradientRule label_gradient(std::string grad_op) {
  return [grad_op = std::move(grad_op)](Gradient& g) {
    g.dx(0, call(grad_op, {g.x(0), g.x(1), g.dy()}, g.attrs()));
  };
}

void cross_entropy_decompose(Compose& c) {
  const Expr logp = call("LogSoftmax", {c.x(0)}, {{"axis", c.integer("axis")}});
  c.y(call("NllLoss", {logp, c.x(1)}, c.attrs()));
}

void count_infer(Inference& i) {
  const std::optional<DType> to = dtype_from_name(i.text("to"));
  i.require(to.has_value() && is_float(*to), "'", i.text("to"), "' is not a floating type");
  i.y({*to, {}});
}

// ---- ONNX's SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss, classes on axis 1

Expr integer_scalar(Builder& b, DType dtype, std::int64_t value) {
  return b.scalar(dtype, static_cast<double>(value));
}

/// [classes] as a shape that broadcasts against x of `rank` with classes on axis 1.
Shape class_shape(const Dim& classes, std::size_t rank) {
  Shape shape(rank - 1, 1);
  shape[0] = classes;
  return shape;
}

/// 1 at the label of every kept position, else 0; x's shape.
Expr one_hot(Expr x, Expr t, std::int64_t ignored) {
  Builder& b = x.builder();
  const Ints classes = constants({x.shape()[1]}, "loss with weights or reduction=none: number of classes");
  HostTensor numbers(t.dtype(), {classes[0]});
  for (std::int64_t k = 0; k < classes[0]; ++k) numbers.set_double(k, static_cast<double>(k));
  const Expr labels = reshape(b.constant(numbers), class_shape(x.shape()[1], x.rank()));
  Shape column = t.shape();
  column.insert(column.begin() + 1, 1);
  const Expr target = reshape(t, column);
  Expr hit = call("Equal", {target, labels});
  if (ignored >= 0 && ignored < classes[0])
    hit = call("And", {hit, call("Not", {call("Equal", {target, integer_scalar(b, t.dtype(), ignored)})})});
  return cast(hit, x.dtype());
}

/// Weighted or unreduced form: `logp` has classes on axis 1.
Expr general_nll(Expr logp, Expr t, Expr weights, std::int64_t ignored, const std::string& reduction) {
  Expr weight = one_hot(logp, t, ignored);
  if (weights) weight = weight * reshape(weights, class_shape(logp.shape()[1], logp.rank()));
  const Expr each = -reduce_sum(weight * logp, {1}, false);
  if (reduction == "none") return each;
  const Expr sum = reduce_sum(each, {}, false);
  return reduction == "sum" ? sum : sum / reduce_sum(weight, {}, false);
}

/// `op`: CrossEntropyLoss or NllLoss over x.
Expr label_loss(Expr x, Expr t, std::string_view op, std::int64_t ignored, const std::string& reduction) {
  const Expr sum = call(op, {x, t}, {{"ignore_index", ignored}});
  if (reduction == "sum") return sum;
  return sum /
         call("CountTargets", {t}, {{"ignore_index", ignored}, {"to", std::string(dtype_name(x.dtype()))}});
}

std::string checked_reduction(const std::string& reduction, std::string_view op) {
  if (reduction != "none" && reduction != "sum" && reduction != "mean")
    throw Error(cat(op, ": unknown reduction '", reduction, "'"));
  return reduction;
}

void import_softmax_cross_entropy(OnnxNode& n) {
  const std::int64_t ignored = n.integer("ignore_index", kNoIgnoredLabel);
  const std::string reduction = checked_reduction(n.text("reduction", "mean"), n.op_type);
  const bool wants_log = n.output_used.size() > 1 && n.output_used[1],
             general = n.has(2) || reduction == "none";
  Expr logp;
  if (wants_log || general) logp = call("LogSoftmax", {n.x(0)}, {{"axis", 1}});
  if (wants_log) n.y(1, logp);
  if (general)
    n.y(general_nll(logp, n.x(1), n.has(2) ? n.x(2) : Expr(), ignored, reduction));
  else
    n.y(label_loss(n.x(0), n.x(1), "CrossEntropyLoss", ignored, reduction));
}

void import_nll(OnnxNode& n) {
  const std::int64_t ignored = n.integer("ignore_index", kNoIgnoredLabel);
  const std::string reduction = checked_reduction(n.text("reduction", "mean"), n.op_type);
  if (n.has(2) || reduction == "none")
    n.y(general_nll(n.x(0), n.x(1), n.has(2) ? n.x(2) : Expr(), ignored, reduction));
  else
    n.y(label_loss(n.x(0), n.x(1), "NllLoss", ignored, reduction));
}

// ---- the same two as entries

std::vector<AttrSpec> onnx_loss_specs() {
  return {{"reduction", std::string("mean")}, {"ignore_index", kNoIgnoredLabel}};
}

void onnx_loss_infer(Inference& i) {
  i.require(i.rank(0) >= 2, "x needs classes on axis 1");
  Shape labels = i.shape(0);
  labels.erase(labels.begin() + 1);
  i.require(!differ(i.shape(1), labels), "the targets must be ", shape_str(labels), ", not ",
            shape_str(i.shape(1)));
  i.y({i.x(0).dtype, checked_reduction(i.text("reduction"), "loss") == "none" ? labels : Shape{}});
}

ComposeRule onnx_loss_decompose(bool softmax) {
  return [softmax](Compose& c) {
    const std::string reduction = c.text("reduction");
    const std::int64_t ignored = c.integer("ignore_index");
    const bool general = c.has(2) || reduction == "none";
    if (!general)
      return c.y(label_loss(c.x(0), c.x(1), softmax ? "CrossEntropyLoss" : "NllLoss", ignored, reduction));
    const Expr logp = softmax ? call("LogSoftmax", {c.x(0)}, {{"axis", 1}}) : c.x(0);
    c.y(general_nll(logp, c.x(1), c.has(2) ? c.x(2) : Expr(), ignored, reduction));
  };
}

}  // namespace

// clang-format off
std::span<const OpDef> loss_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "CrossEntropyLoss",  // sum of -log softmax(x)[label]
   .signature = "(x: float, t: int) -> loss",
   .attrs = label_specs(),
   .onnx = {},
   .infer = label_loss_infer,
   .decompose = cross_entropy_decompose,
   .gradient = label_gradient("CrossEntropyLossGrad"),
   .flops = [](const Inference& i) { return 5 * numel(i.shape(0)); },
   .samples = {"CrossEntropyLoss(f32[3,5], i64[3]=[0,4,2])", "CrossEntropyLoss(f32[4,5], i64[4]=[0,-100,2,2]) {ignore_index=-100}",
               "CrossEntropyLoss(f32[2,3,4], i64[2,4]=[0,1,2,1,2,0,0,1])", "CrossEntropyLoss(f32[2,3,4], i64[2,3]=[0,1,2,3,2,0]) {axis=2}"}},

  {.name = "CrossEntropyLossGrad",
   .signature = "(x: float, t: int, dy: float) -> dx",
   .attrs = label_specs(),
   .onnx = {},
   .infer = label_loss_grad_infer,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return 5 * numel(i.shape(0)); },
   .samples = {"CrossEntropyLossGrad(f32[4,5], i64[4]=[0,-100,2,2], f32[]) {ignore_index=-100}"}},

  {.name = "NllLoss",  // sum of -logp[label]
   .signature = "(logp: float, t: int) -> loss",
   .attrs = label_specs(),
   .onnx = {},
   .infer = label_loss_infer,
   .gradient = label_gradient("NllLossGrad"),
   .samples = {"NllLoss(f32[3,5], i64[3]=[0,4,2])", "NllLoss(f32[2,3,4], i64[2,4]=[0,1,2,1,2,0,9,1]) {ignore_index=9}"}},

  {.name = "NllLossGrad",
   .signature = "(logp: float, t: int, dy: float) -> dx",
   .attrs = label_specs(),
   .onnx = {},
   .infer = label_loss_grad_infer,
   .gradient = not_differentiable,
   .samples = {"NllLossGrad(f32[3,5], i64[3]=[0,4,2], f32[])"}},

  {.name = "CountTargets",  // labels that are not ignored
   .signature = "(t: int) -> count",
   .attrs = {{"ignore_index", kNoIgnoredLabel}, {"to", std::string("f32")}},
   .onnx = {},
   .infer = count_infer,
   .gradient = zero_almost_everywhere,
   .samples = {"CountTargets(i64[4]=[0,-100,2,2]) {ignore_index=-100}", "CountTargets(i64[2,2]=[0,1,2,2]) {to=\"f64\"}"}},

  {.name = "SoftmaxCrossEntropyLoss",
   .signature = "(x: float, t: int, weights?: float) -> loss",
   .attrs = onnx_loss_specs(),
   .onnx = {.since = 12, .import = import_softmax_cross_entropy},
   .infer = onnx_loss_infer,
   .decompose = onnx_loss_decompose(true),
   .gradient = from_decomposition,
   .samples = {"SoftmaxCrossEntropyLoss(f32[3,5], i64[3]=[0,4,2])",
               "SoftmaxCrossEntropyLoss(f32[3,5], i64[3]=[0,1,2], f32[5] in (0.5, 2)) {ignore_index=1}",
               "SoftmaxCrossEntropyLoss(f32[2,3,2], i64[2,2]=[0,1,2,2]) {reduction=\"none\"}"}},

  {.name = "NegativeLogLikelihoodLoss",
   .signature = "(logp: float, t: int, weights?: float) -> loss",
   .attrs = onnx_loss_specs(),
   .onnx = {.since = 12, .import = import_nll},
   .infer = onnx_loss_infer,
   .decompose = onnx_loss_decompose(false),
   .gradient = from_decomposition,
   .samples = {"NegativeLogLikelihoodLoss(f32[3,5], i64[3]=[0,4,2]) {reduction=\"sum\"}",
               "NegativeLogLikelihoodLoss(f32[3,5], i64[3]=[0,4,-1], f32[5] in (0.5, 2)) {ignore_index=-1}"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

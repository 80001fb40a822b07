// Reductions over axes, SumTo (the transpose of broadcasting), ArgMax, SumSquares.
#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

std::vector<AttrSpec> reduction_specs() { return {{"axes", Ints{}, true}, {"keepdims", 1}}; }

Shape reduced_shape(Shape x, const Ints& axes, bool keepdims) {
  x = kept(std::move(x), axes);
  if (keepdims) return x;
  for (std::size_t k = axes.size(); k-- > 0;) x.erase(x.begin() + axes[k]);
  return x;
}

void reduce_infer(Inference& i) {
  const Ints axes = i.integers("axes");
  i.require(sorted_axes(axes, i.rank(0)) == axes, "axes ", shape_str(axes),
            " must be sorted and not negative");
  i.require(!axes.empty() || i.rank(0) == 0, "axes must not be empty");
  i.y({i.x(0).dtype, reduced_shape(i.shape(0), axes, i.flag("keepdims"))});
}

Dim reduce_flops(const Inference& i) { return numel(i.shape(0)); }

/// A reduction's value (or its gradient) stretched to x's shape.
Expr stretched(Gradient& g, Expr y) {
  const Shape& shape = g.type(0).shape;
  return expand(reshape(y, kept(shape, g.integers("axes"))), shape);
}

void mean_gradient(Gradient& g) {
  Dim count = 1;
  for (const std::int64_t axis : g.integers("axes")) count *= g.type(0).shape[static_cast<std::size_t>(axis)];
  g.dx(0, stretched(g, g.dy() / g.builder().dim_scalar(g.dy().dtype(), count)));
}

void max_gradient(Gradient& g) {  // ties share the gradient
  const Shape one = kept(g.type(0).shape, g.integers("axes"));
  const Expr hit = cast(call("Equal", {g.x(0), reshape(g.y(), one)}), g.type(0).dtype);
  const Expr ties = call("ReduceSum", {hit}, {{"axes", g.integers("axes")}});
  g.dx(0, hit * (reshape(g.dy(), one) / ties));
}

/// Product of the slices along every reduced axis: for small axes of known size, as in shape arithmetic.
void product_decompose(Compose& c) {
  const Ints axes = c.integers("axes");
  Expr y = c.x(0);
  for (const std::int64_t axis : axes) {
    const std::int64_t size =
        constants({y.shape()[static_cast<std::size_t>(axis)]}, "ReduceProd: size").front();
    if (size == 0) throw Error("ReduceProd over an empty axis is not supported");
    Expr product = slice(y, axis, 0, 1);
    for (std::int64_t k = 1; k < size; ++k) product = product * slice(y, axis, k, k + 1);
    y = product;
  }
  c.y(c.flag("keepdims") ? y : reshape(y, c.out_type().shape));
}

std::optional<Dims> product_fold(const Inference& i) {
  const std::optional<Dims> ints = i.ints(0);
  if (!ints || i.integers("axes").size() != i.rank(0)) return std::nullopt;
  Dim product = 1;
  for (const Dim& dim : *ints) product *= dim;
  return Dims{product};
}

void sum_to_infer(Inference& i) {
  const Shape to = i.dims("shape"), &x = i.shape(0);
  i.require(to.size() <= x.size(), "cannot sum ", shape_str(x), " to ", shape_str(to));
  for (std::size_t k = 0; k < to.size(); ++k) {
    const Dim& from = x[k + x.size() - to.size()];
    i.require(to[k] == Dim(1) || !differ(to[k], from), "cannot sum ", shape_str(x), " to ", shape_str(to));
  }
  i.y({i.x(0).dtype, to});
}

void sum_to_decompose(Compose& c) {
  const Shape to = c.dims("shape"), &x = c.type(0).shape;
  const std::size_t added = x.size() - to.size();
  Ints axes;
  for (std::size_t k = 0; k < x.size(); ++k)
    if (k < added || (to[k - added] == Dim(1) && x[k] != Dim(1)))
      axes.push_back(static_cast<std::int64_t>(k));
  c.y(reshape(axes.empty() ? c.x(0) : reduce_sum(c.x(0), axes, true), to));
}

void argmax_infer(Inference& i) {
  const std::int64_t axis = i.integer("axis");
  i.require(axis >= 0 && axis < static_cast<std::int64_t>(i.rank(0)), "axis ", axis, " is out of range");
  i.y({DType::i64, reduced_shape(i.shape(0), {axis}, i.flag("keepdims"))});
}

void sum_squares_infer(Inference& i) {
  for (std::size_t k = 0; k < i.count(); ++k)
    i.require(i.x(k).dtype == i.x(0).dtype, "the element types differ");
  i.y({i.x(0).dtype, {}});
}

void sum_squares_gradient(Gradient& g) {
  for (std::size_t k = 0; k < g.count(); ++k) g.dx(k, g.dy() * (2 * g.x(k)));
}

void sum_squares_decompose(Compose& c) {
  Expr y = reduce_sum(c.x(0) * c.x(0), {}, false);
  for (std::size_t k = 1; k < c.count(); ++k) y = y + reduce_sum(c.x(k) * c.x(k), {}, false);
  c.y(y);
}

// ---- import

/// Axes come from the attribute or, in later opsets, from input 1; none means all.
void import_reduce(OnnxNode& n) {
  const std::optional<Dims> given = n.attr_or_input("axes", 1);
  Ints axes = given ? sorted_axes(constants(*given, cat(n.op_type, ": axes")), n.rank(0)) : Ints{};
  if (axes.empty()) {
    if (n.integer("noop_with_empty_axes", 0) != 0) return n.y(n.x(0));
    axes = all_axes(n.rank(0));
  }
  n.y(call(n.op_type, {n.x(0)}, {{"axes", axes}, {"keepdims", n.integer("keepdims", 1)}}));
}

void import_argmax(OnnxNode& n) {
  if (n.integer("select_last_index", 0) != 0) throw Error("ArgMax with select_last_index=1 is not supported");
  const std::int64_t axis = normal_axis(n.integer("axis", 0), n.rank(0));
  n.y(call("ArgMax", {n.x(0)}, {{"axis", axis}, {"keepdims", n.integer("keepdims", 1)}}));
}

}  // namespace

// clang-format off
std::span<const OpDef> reduce_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "ReduceSum",
   .signature = "(x: number) -> y",
   .attrs = reduction_specs(),
   .onnx = {.since = 1, .import = import_reduce},
   .infer = reduce_infer,
   .gradient = [](Gradient& g) { g.dx(0, stretched(g, g.dy())); },
   .flops = reduce_flops,
   .samples = {"ReduceSum(f32[2,3,4]) {axes=[1]}", "ReduceSum(f32[2,3,4]) {axes=[0,2], keepdims=0}", "ReduceSum(f32[2,3]) {axes=[0,1], keepdims=0}",
               "ReduceSum(f32[]) {axes=[]}"}},

  {.name = "ReduceMean",
   .signature = "(x: float) -> y",
   .attrs = reduction_specs(),
   .onnx = {.since = 1, .import = import_reduce},
   .infer = reduce_infer,
   .gradient = mean_gradient,
   .flops = reduce_flops,
   .samples = {"ReduceMean(f32[2,3,4]) {axes=[1]}", "ReduceMean(f32[2,3,4,4]) {axes=[2,3]}", "ReduceMean(f32[2,3]) {axes=[0,1], keepdims=0}"}},

  {.name = "ReduceMax",
   .signature = "(x: number) -> y",
   .attrs = reduction_specs(),
   .onnx = {.since = 1, .import = import_reduce},
   .infer = reduce_infer,
   .gradient = max_gradient,
   .flops = reduce_flops,
   .samples = {"ReduceMax(f32[2,3,4]) {axes=[1]}", "ReduceMax(f32[2,3,4]) {axes=[0,2], keepdims=0}"}},

  {.name = "ReduceProd",
   .signature = "(x: number) -> y",
   .attrs = reduction_specs(),
   .onnx = {.since = 1, .import = import_reduce},
   .infer = reduce_infer,
   .fold_dims = product_fold,
   .decompose = product_decompose,
   .gradient = from_decomposition,
   .samples = {"ReduceProd(f32[2,3]) {axes=[1]}", "ReduceProd(i64[3]=[2,3,4]) {axes=[0], keepdims=0}"}},

  {.name = "SumTo",
   .signature = "(x: float) -> y",
   .attrs = {{"shape", Ints{}, true}},
   .onnx = {},
   .infer = sum_to_infer,
   .decompose = sum_to_decompose,
   .gradient = [](Gradient& g) { g.dx(0, expand(g.dy(), g.type(0).shape)); },
   .flops = reduce_flops,
   .samples = {"SumTo(f32[2,3,4]) {shape=[4]}", "SumTo(f32[2,3,4]) {shape=[2,1,4]}", "SumTo(f32[2,3]) {shape=[]}", "SumTo(f32[2,3,4]) {shape=[3,1]}"}},

  {.name = "ArgMax",  // the first maximum
   .signature = "(x: number) -> y",
   .attrs = {{"axis", 0, true}, {"keepdims", 0}},
   .onnx = {.since = 1, .import = import_argmax},
   .infer = argmax_infer,
   .gradient = zero_almost_everywhere,
   .flops = reduce_flops,
   .samples = {"ArgMax(f32[2,3,4]) {axis=1}", "ArgMax(f32[2,3]) {axis=0, keepdims=1}"}},

  {.name = "SumSquares",  // accumulated in double in a fixed order
   .signature = "(xs...: float) -> y",
   .onnx = {},
   .infer = sum_squares_infer,
   .decompose = sum_squares_decompose,
   .gradient = sum_squares_gradient,
   .samples = {"SumSquares(f32[2,3], f32[4], f32[])", "SumSquares(f32[5])"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

// Gather, and the ops of shape arithmetic: Shape, Range, ConstantOfShape.
#include <algorithm>
#include <cmath>

#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

// ---- Gather. Negative indices count from the end.

Shape gathered(const Shape& x, const Shape& indices, std::int64_t axis) {
  Shape y(x.begin(), x.begin() + axis);
  y.insert(y.end(), indices.begin(), indices.end());
  y.insert(y.end(), x.begin() + axis + 1, x.end());
  return y;
}

void gather_infer(Inference& i) {
  const std::int64_t axis = i.integer("axis");
  i.require(axis >= 0 && axis < static_cast<std::int64_t>(i.rank(0)), "axis ", axis, " is out of range");
  i.y({i.x(0).dtype, gathered(i.shape(0), i.shape(1), axis)});
}

std::optional<Dims> gather_fold(const Inference& i) {
  const std::optional<Dims> data = i.ints(0), indices = i.ints(1);
  if (!data || !indices || i.rank(0) != 1 || !is_static(*indices)) return std::nullopt;
  const auto size = static_cast<std::int64_t>(data->size());
  Dims picked;
  for (std::int64_t at : static_shape(*indices)) {
    if (at < 0) at += size;
    i.require(at >= 0 && at < size, "index ", at, " is not in 0..", size - 1);
    picked.push_back((*data)[static_cast<std::size_t>(at)]);
  }
  return picked;
}

void gather_gradient(Gradient& g) {
  g.dx(0, call("GatherGrad", {g.dy(), g.x(1)},
               {{"axis", g.integer("axis")}, {"shape", make_attr(g.type(0).shape)}}));
}

void gather_grad_infer(Inference& i) {
  const Shape x = i.dims("shape");
  const std::int64_t axis = i.integer("axis");
  i.require(axis >= 0 && axis < static_cast<std::int64_t>(x.size()), "axis ", axis, " is out of range");
  const Shape expected = gathered(x, i.shape(1), axis);
  i.require(!differ(i.shape(0), expected), "dy should be ", shape_str(expected));
  i.y({i.x(0).dtype, x});
}

void import_gather(OnnxNode& n) {
  n.y(call("Gather", {n.x(0), n.x(1)}, {{"axis", normal_axis(n.integer("axis", 0), n.rank(0))}}));
}

// ---- Shape: contents are always known, symbolically

constexpr std::int64_t kToTheEnd = std::numeric_limits<std::int64_t>::max();

/// The dimensions start..end of input 0; out of range ones are clamped, as ONNX says.
Dims shape_slice(const Inference& i) {
  const auto rank = static_cast<std::int64_t>(i.rank(0));
  const auto at = [rank](std::int64_t k) { return std::clamp<std::int64_t>(k < 0 ? k + rank : k, 0, rank); };
  const std::int64_t start = at(i.integer("start")), end = std::max(start, at(i.integer("end")));
  return {i.shape(0).begin() + start, i.shape(0).begin() + end};
}

void import_shape(OnnxNode& n) {
  n.y(call("Shape", {n.x(0)}, {{"start", n.integer("start", 0)}, {"end", n.integer("end", kToTheEnd)}}));
}

void shape_decompose(Compose& c) {
  Builder& b = c.builder();
  const TensorType& type = c.out_type();
  Dims dims = c.type(0).shape;
  const auto rank = static_cast<std::int64_t>(dims.size());
  const std::int64_t start = c.integer("start") < 0 ? c.integer("start") + rank : c.integer("start");
  const Ints count = static_shape(type.shape);
  dims = Dims(dims.begin() + std::clamp<std::int64_t>(start, 0, rank), dims.end());
  dims.resize(static_cast<std::size_t>(count[0]));
  c.y(b.expr(b.graph().add_constant(b.graph().unique_name(b.hint()), type, dims)));
}

// ---- ConstantOfShape: canonically Expand of a scalar

Dims known_shape(const Inference& i) {
  const std::optional<Dims> dims = i.ints(0);
  i.require(dims.has_value(), "the shape must be known before the run");
  return *dims;
}

void constant_of_shape_infer(Inference& i) {
  const std::optional<DType> to = dtype_from_name(i.text("to"));
  i.require(to.has_value(), "unknown element type '", i.text("to"), "'");
  i.y({*to, known_shape(i)});
}

std::optional<Dims> constant_of_shape_fold(const Inference& i) {
  const Dims shape = known_shape(i);
  const double value = i.number("value");
  if (!is_static(shape) || numel(static_shape(shape)) > kMostFolded || value != std::floor(value))
    return std::nullopt;
  return Dims(static_cast<std::size_t>(numel(static_shape(shape))), Dim(static_cast<std::int64_t>(value)));
}

void constant_of_shape_decompose(Compose& c) {
  const TensorType& type = c.out_type();
  c.y(expand(c.builder().scalar(type.dtype, c.number("value")), type.shape));
}

void import_constant_of_shape(OnnxNode& n) {
  HostTensor value(DType::f32, {1});
  const auto at = n.tensors.find("value");
  if (at != n.tensors.end()) value = at->second;
  if (value.numel() != 1) throw Error("ConstantOfShape: value must have one element");
  const Dims shape = n.ints(0, "shape");
  const Expr scalar = n.b.scalar(value.dtype(), 0);
  if (value == HostTensor(value.dtype(), {1})) return n.y(expand(scalar, shape));
  n.y(expand(n.b.constant(value.reshaped({})), shape));
}

// ---- Range: only where all three numbers are known

std::optional<Ints> range_numbers(const Inference& i) {
  Ints numbers;
  for (std::size_t k = 0; k < 3; ++k) {
    const std::optional<Dims> ints = i.ints(k);
    if (!ints || ints->size() != 1 || !ints->front().is_constant()) return std::nullopt;
    numbers.push_back(ints->front().value());
  }
  return numbers;
}

std::int64_t range_count(const Ints& r) {
  const std::int64_t span = r[1] - r[0], step = r[2];
  if (step == 0) throw Error("Range: the step is 0");
  if ((span > 0) != (step > 0)) return 0;
  return (span + step - (step > 0 ? 1 : -1)) / step;
}

void range_infer(Inference& i) {
  const std::optional<Ints> numbers = range_numbers(i);
  i.require(numbers.has_value(), "start, limit and step must be whole numbers known before the run");
  i.y({i.x(0).dtype, {range_count(*numbers)}});
}

std::optional<Dims> range_fold(const Inference& i) {
  const Ints numbers = *range_numbers(i);
  Dims values;
  if (range_count(numbers) > kMostFolded) return std::nullopt;
  for (std::int64_t k = 0; k < range_count(numbers); ++k) values.emplace_back(numbers[0] + k * numbers[2]);
  return values;
}

Expr range_constant(Builder& b, DType dtype, double start, double step, std::int64_t count) {
  HostTensor values(dtype, {count});
  for (std::int64_t k = 0; k < count; ++k) values.set_double(k, start + static_cast<double>(k) * step);
  return b.constant(values);
}

void range_decompose(Compose& c) {
  const auto number = [&c](std::size_t k) {
    return static_cast<double>(c.builder().graph().value(c.x(k).id()).ints.value().front().value());
  };
  c.y(range_constant(c.builder(), c.type(0).dtype, number(0), number(2), c.out_type().shape[0].value()));
}

/// Elements that may be fractions, as HostTensor holds them; whole numbers may also come from shape
/// arithmetic.
double range_number(const OnnxNode& n, std::size_t k) {
  constexpr std::string_view kNames[] = {"start", "limit", "delta"};
  const Value& value = n.b.graph().value(n.x(k).id());
  if (value.data) return n.constant(k, kNames[k]);
  const Dims dims = n.ints(k, kNames[k]);
  if (dims.size() != 1 || !dims[0].is_constant())
    throw Error(cat("Range: the ", kNames[k], " ", shape_str(dims), " must be a plain number"))
        .hint("give the size with --dim NAME=VALUE");
  return static_cast<double>(dims[0].value());
}

void import_range(OnnxNode& n) {
  const double start = range_number(n, 0), limit = range_number(n, 1), step = range_number(n, 2);
  if (step == 0) throw Error("Range: the delta is 0");
  const double count = std::max(0.0, std::ceil((limit - start) / step));
  constexpr double kMost = 1 << 24;
  if (!(count <= kMost)) throw Error(cat("Range of ", number_str(count), " elements is too long"));
  n.y(range_constant(n.b, n.type(0).dtype, start, step, static_cast<std::int64_t>(count)));
}

}  // namespace

// clang-format off
std::span<const OpDef> index_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "Gather",
   .signature = "(x: any, indices: int) -> y",
   .attrs = {{"axis", 0}},
   .onnx = {.since = 1, .import = import_gather},
   .infer = gather_infer,
   .fold_dims = gather_fold,
   .gradient = gather_gradient,
   .samples = {"Gather(f32[4,3], i64[2,2]=[0,3,-1,0])", "Gather(f32[2,5,3], i64[3]=[4,4,1]) {axis=1}", "Gather(f32[4,3], i64[]=[2])"}},

  {.name = "GatherGrad",  // rows of equal indices are added in order
   .signature = "(dy: float, indices: int) -> dx",
   .attrs = {{"axis", 0}, {"shape", Ints{}, true}},
   .onnx = {},
   .infer = gather_grad_infer,
   .gradient = [](Gradient& g) { g.dx(0, call("Gather", {g.dy(), g.x(1)}, {{"axis", g.integer("axis")}})); },
   .samples = {"GatherGrad(f32[2,2,3], i64[2,2]=[0,3,-1,0]) {shape=[4,3]}", "GatherGrad(f32[2,3,3], i64[3]=[4,4,1]) {axis=1, shape=[2,5,3]}"}},

  {.name = "Shape",
   .signature = "(x: any) -> y",
   .attrs = {{"start", 0}, {"end", kToTheEnd}},
   .onnx = {.since = 1, .import = import_shape},
   .infer = [](Inference& i) { i.y({DType::i64, {static_cast<std::int64_t>(shape_slice(i).size())}}); },
   .fold_dims = [](const Inference& i) { return std::optional(shape_slice(i)); },
   .decompose = shape_decompose,
   .gradient = zero_almost_everywhere,
   .samples = {"Shape(f32[2,3,4])", "Shape(f32[2,3,4]) {start=1, end=-1}", "Shape(f32[2,3,4]) {start=-2}"}},

  {.name = "ConstantOfShape",
   .signature = "(shape: int) -> y",
   .attrs = {{"value", 0.0}, {"to", std::string("f32")}},
   .onnx = {.since = 9, .import = import_constant_of_shape},
   .infer = constant_of_shape_infer,
   .fold_dims = constant_of_shape_fold,
   .decompose = constant_of_shape_decompose,
   .gradient = zero_almost_everywhere,
   .samples = {"ConstantOfShape(i64[2]=[2,3]) {value=1.5}", "ConstantOfShape(i64[1]=[3]) {value=2, to=\"i64\"}"}},

  {.name = "Range",
   .signature = "(start: number, limit: number, delta: number) -> y",
   .onnx = {.since = 11, .import = import_range},
   .infer = range_infer,
   .fold_dims = range_fold,
   .decompose = range_decompose,
   .gradient = zero_almost_everywhere,
   .samples = {"Range(i64[]=[1], i64[]=[8], i64[]=[3])", "Range(i64[]=[3], i64[]=[-1], i64[]=[-1])"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

// Elementwise ops: unary, binary with NumPy broadcasting, comparisons, Where, Cast, Clip.
#include <cmath>
#include <limits>
#include <numbers>

#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Traits unary() { return {.in_place = {{0, 0}}}; }
Traits binary() { return {.in_place = {{0, 0}, {1, 0}}}; }

// ---- shape rules

void cast_infer(Inference& i) {
  const std::optional<DType> to = dtype_from_name(i.text("to"));
  i.require(to.has_value(), "unknown element type '", i.text("to"), "'");
  i.y({*to, i.shape(0)});
}

void compare_infer(Inference& i) {
  i.require(i.x(0).dtype == i.x(1).dtype, "the operands have different element types");
  i.y({DType::boolean, broadcast(i.shape(0), i.shape(1))});
}

void where_infer(Inference& i) {
  i.require(i.x(1).dtype == i.x(2).dtype, "the two branches have different element types");
  i.y({i.x(1).dtype, broadcast(i.shape(0), broadcast(i.shape(1), i.shape(2)))});
}

// ---- contents of small integer tensors

/// True for sizes against negative numbers (-1 is a marker in shape arithmetic, sizes are never negative).
bool known_different(const Dim& a, const Dim& b) {
  if (differ(a, b)) return true;
  const auto negative = [](const Dim& d) { return d.is_constant() && d.value() < 0; };
  return (negative(a) && !b.is_constant()) || (negative(b) && !a.is_constant());
}

std::optional<Dim> fold_equal(std::span<const Dim> v) {
  if (v[0] == v[1]) return Dim(1);
  if (known_different(v[0], v[1])) return Dim(0);
  return std::nullopt;
}

std::optional<Dim> fold_where(std::span<const Dim> v) {
  if (!v[0].is_constant()) return std::nullopt;
  return v[0].value() != 0 ? v[1] : v[2];
}

std::optional<Dims> fold_div(const Inference& i) {
  const bool whole = !is_float(i.x(0).dtype);
  return fold_elements(i, [whole](std::span<const Dim> v) -> std::optional<Dim> {
    if (v[1] == Dim(0)) return std::nullopt;
    if (v[0].is_constant() && v[1].is_constant()) {
      if (v[1].value() == -1) return -v[0];  // the smallest integer has no quotient
      if (whole || v[0].value() % v[1].value() == 0) return Dim(v[0].value() / v[1].value());
      return std::nullopt;
    }
    if (const std::optional<Dim> exact = exact_div(v[0], v[1])) return exact;
    if (!whole) return std::nullopt;
    return floor_div(v[0], v[1]);  // sizes are not negative: floor is truncation
  });
}

std::optional<Dims> fold_cast(const Inference& i) {
  if (is_float(i.x(0).dtype) || dtype_from_name(i.text("to")) != DType::boolean) return i.ints(0);
  return fold_elements(i, [](std::span<const Dim> v) -> std::optional<Dim> {
    if (!v[0].is_constant()) return std::nullopt;
    return Dim(v[0].value() != 0 ? 1 : 0);
  });
}

/// Max (sign 1) and Min (sign -1) where the difference is known.
FoldRule fold_extreme(int sign) {
  return [sign](const Inference& i) {
    return fold_elements(i, [sign](std::span<const Dim> v) -> std::optional<Dim> {
      const Dim difference = v[0] - v[1];
      if (!difference.is_constant()) return std::nullopt;
      return difference.value() * sign >= 0 ? v[0] : v[1];
    });
  };
}

FoldRule fold_with(FoldElement f) {
  return [f = std::move(f)](const Inference& i) { return fold_elements(i, f); };
}

// ---- gradients

Expr as_number(Expr condition, DType dtype) { return cast(condition, dtype); }

void extreme_gradient(Gradient& g) {  // ties share the gradient
  const DType dtype = g.type(0).dtype;
  const Expr first = as_number(call("Equal", {g.x(0), g.y()}), dtype);
  const Expr second = as_number(call("Equal", {g.x(1), g.y()}), dtype);
  const Expr share = g.dy() / (first + second);
  g.dx(0, share * first);
  g.dx(1, share * second);
}

void pow_gradient(Gradient& g) {
  const Expr x = g.x(0), e = g.x(1);
  g.dx(0, g.dy() * e * call("Pow", {x, e - 1}));
  const Expr zero = g.builder().scalar(x.dtype(), 0), one = g.builder().scalar(x.dtype(), 1);
  const Expr positive = call("Greater", {x, zero});
  g.dx(1, call("Where", {positive, g.dy() * g.y() * log(call("Where", {positive, x, one})), zero}));
}

void where_gradient(Gradient& g) {
  const Expr zero = g.builder().scalar(g.dy().dtype(), 0);
  g.dx(1, call("Where", {g.x(0), g.dy(), zero}));
  g.dx(2, call("Where", {g.x(0), zero, g.dy()}));
}

void cast_gradient(Gradient& g) {  // to an integer: a step function
  if (is_float(g.type(0).dtype) && is_float(g.dy().dtype())) g.dx(0, cast(g.dy(), g.type(0).dtype));
}

// ---- import

/// TensorProto.DataType of the types we have.
DType dtype_of_onnx(std::int64_t code) {
  switch (code) {
    case 1: return DType::f32;
    case 2: return DType::u8;
    case 3: return DType::i8;
    case 5: return DType::i16;
    case 6: return DType::i32;
    case 7: return DType::i64;
    case 9: return DType::boolean;
    case 10: return DType::f16;
    case 11: return DType::f64;
    case 4: return DType::u16;
    case 12: return DType::u32;
    case 13: return DType::u64;
    case 16: return DType::bf16;
    default: throw Error(cat("Cast to ONNX element type ", code, " is not supported"));
  }
}

/// The value itself where nothing changes.
Expr cast_if_needed(Expr x, DType dtype) { return x.dtype() == dtype ? x : cast(x, dtype); }

void import_cast(OnnxNode& n) {
  n.y(call("Cast", {n.x(0)}, {{"to", std::string(dtype_name(dtype_of_onnx(n.integer("to", 0))))}}));
}

void import_cast_like(OnnxNode& n) { n.y(cast_if_needed(n.x(0), n.type(1).dtype)); }

/// Max, Min, Sum and the like of any number of inputs: a chain of the binary op.
std::function<void(OnnxNode&)> import_chain(std::string op) {
  return [op = std::move(op)](OnnxNode& n) {
    Expr y = n.x(0);
    for (std::size_t i = 1; i < n.inputs.size(); ++i) y = call(op, {y, n.x(i)});
    n.y(y);
  };
}

void import_pow(OnnxNode& n) {
  const std::optional<double> exponent = known_number(n, 1);
  const bool same_shape = exponent && broadcast(n.type(0).shape, n.type(1).shape) == n.type(0).shape;
  if (same_shape && *exponent == 2) return n.y(call("Mul", {n.x(0), n.x(0)}));
  if (same_shape && *exponent == 0.5) return n.y(sqrt(n.x(0)));
  n.y(call("Pow", {n.x(0), cast_if_needed(n.x(1), n.type(0).dtype)}));
}

/// The largest float stands for "no bound" in old files.
double bound(double value) {
  return std::abs(value) >= std::numeric_limits<float>::max() ? std::copysign(kInfinity, value) : value;
}

void import_clip(OnnxNode& n) {
  std::optional<double> low = n.number("min", -kInfinity), high = n.number("max", kInfinity);
  if (n.opset >= 11) {
    if (n.has(1)) low = known_number(n, 1);
    if (n.has(2)) high = known_number(n, 2);
  }
  if (low && high && is_float(n.type(0).dtype))
    return n.y(call("Clip", {n.x(0)}, {{"min", bound(*low)}, {"max", bound(*high)}}));
  Expr y = n.x(0);
  if (n.has(1)) y = call("Max", {y, n.x(1)});
  if (n.has(2)) y = call("Min", {y, n.x(2)});
  n.y(y);
}

}  // namespace

// clang-format off
static std::vector<OpDef> unary_ops() {
  return {
  {.name = "Neg",
   .signature = "(x: number) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .fold_dims = fold_with([](std::span<const Dim> v) { return std::optional<Dim>(-v[0]); }),
   .gradient = [](Gradient& g) { g.dx(0, -g.dy()); },
   .samples = {"Neg(f32[2,3])"}},

  {.name = "Exp",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * g.y()); },
   .samples = {"Exp(f32[2,3])"}},

  {.name = "Log",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() / g.x(0)); },
   .samples = {"Log(f32[2,3] in (0.2, 3))"}},

  {.name = "Sqrt",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() / (2 * g.y())); },
   .samples = {"Sqrt(f32[2,3] in (0.2, 3))"}},

  {.name = "Reciprocal",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, -(g.dy() * (g.y() * g.y()))); },
   .samples = {"Reciprocal(f32[2,3] in (0.3, 2))"}},

  {.name = "Sigmoid",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .decompose = [](Compose& c) { c.y(1 / (1 + exp(-c.x(0)))); },
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * (g.y() * (1 - g.y()))); },
   .samples = {"Sigmoid(f32[2,3])"}},

  {.name = "Tanh",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * (1 - g.y() * g.y())); },
   .samples = {"Tanh(f32[2,3])"}},

  {.name = "Relu",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * call("Step", {g.y()})); },
   .kinks = {0},
   .samples = {"Relu(f32[2,3])", "Relu(f32[2,3,4,4])"}},

  {.name = "Step",  // 1 where x > 0, else 0
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {},
   .infer = same_as_first_input,
   .gradient = zero_almost_everywhere,
   .kinks = {0},
   .samples = {"Step(f32[2,3])"}},

  {.name = "Abs",
   .signature = "(x: number) -> y",
   .traits = unary(),
   .onnx = {.since = 6},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * call("Sign", {g.x(0)})); },
   .kinks = {0},
   .samples = {"Abs(f32[2,3])"}},

  {.name = "Sign",
   .signature = "(x: number) -> y",
   .traits = unary(),
   .onnx = {.since = 9},
   .infer = same_as_first_input,
   .gradient = zero_almost_everywhere,
   .kinks = {0},
   .samples = {"Sign(f32[2,3])"}},

  {.name = "Erf",
   .signature = "(x: float) -> y",
   .traits = unary(),
   .onnx = {.since = 9},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) {
     const Expr x = g.x(0);
     g.dx(0, g.dy() * (2 * std::numbers::inv_sqrtpi * exp(-(x * x))));
   },
   .samples = {"Erf(f32[2,3])"}},

  {.name = "Identity",
   .signature = "(x: any) -> y",
   .traits = unary(),
   .onnx = {.since = 1},
   .infer = same_as_first_input,
   .fold_dims = fold_same,
   .gradient = [](Gradient& g) { g.dx(0, g.dy()); },
   .samples = {"Identity(f32[2,3])"}},

  {.name = "Copy",  // an own buffer with the same contents: never removed as an alias
   .signature = "(x: any) -> y",
   .onnx = {},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy()); },
   .samples = {"Copy(f32[2,3])"}},

  {.name = "Clip",
   .signature = "(x: float) -> y",
   .attrs = {{"min", -kInfinity}, {"max", kInfinity}},
   .traits = unary(),
   .onnx = {.since = 6, .import = import_clip},
   .infer = same_as_first_input,
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * call("ClipMask", {g.x(0)}, g.attrs())); },
   .kinks = {-0.5, 0, 0.5},
   .samples = {"Clip(f32[2,3]) {min=-0.5, max=0.5}", "Clip(f32[2,3]) {min=0.0}", "Clip(f32[2,3]) {max=0.5}"}},

  {.name = "ClipMask",  // 1 where min <= x <= max, else 0
   .signature = "(x: float) -> y",
   .attrs = {{"min", -kInfinity}, {"max", kInfinity}},
   .traits = unary(),
   .onnx = {},
   .infer = same_as_first_input,
   .gradient = zero_almost_everywhere,
   .kinks = {-0.5, 0.5},
   .samples = {"ClipMask(f32[2,3]) {min=-0.5, max=0.5}"}},

  {.name = "Cast",
   .signature = "(x: any) -> y",
   .attrs = {{"to", std::string("f32")}},
   .onnx = {.since = 6, .import = import_cast},
   .infer = cast_infer,
   .fold_dims = fold_cast,
   .gradient = cast_gradient,
   .samples = {"Cast(f32[2,3]) {to=\"f64\"}", "Cast(i64[3]=[0,1,2]) {to=\"f32\"}", "Cast(f32[2,3]) {to=\"i64\"}"}},

  {.name = "CastLike",
   .signature = "(x: any, like: any) -> y",
   .onnx = {.since = 15, .import = import_cast_like},
   .infer = [](Inference& i) { i.y({i.x(1).dtype, i.shape(0)}); },
   .fold_dims = fold_same,
   .decompose = [](Compose& c) { c.y(cast_if_needed(c.x(0), c.type(1).dtype)); },
   .gradient = from_decomposition,
   .samples = {"CastLike(f32[2,3], f64[1])"}},

  {.name = "Not",
   .signature = "(x: bool) -> y",
   .traits = unary(),
   .onnx = {.since = 1},
   .infer = same_as_first_input,
   .gradient = zero_almost_everywhere,
   .samples = {"Not(bool[2,3])"}},
  };
}

static std::vector<OpDef> binary_ops() {
  return {
  {.name = "Add",
   .signature = "(a: number, b: number) -> y",
   .traits = binary(),
   .onnx = {.since = 7},
   .infer = broadcast_inputs,
   .fold_dims = fold_with([](std::span<const Dim> v) { return std::optional<Dim>(v[0] + v[1]); }),
   .gradient = [](Gradient& g) { g.dx(0, g.dy()); g.dx(1, g.dy()); },
   .samples = {"Add(f32[2,3], f32[2,3])", "Add(f32[2,1,3], f32[4,1])", "Add(f32[], f32[3])", "Add(i64[2]=[1,2], i64[]=[3])"}},

  {.name = "Sub",
   .signature = "(a: number, b: number) -> y",
   .traits = binary(),
   .onnx = {.since = 7},
   .infer = broadcast_inputs,
   .fold_dims = fold_with([](std::span<const Dim> v) { return std::optional<Dim>(v[0] - v[1]); }),
   .gradient = [](Gradient& g) { g.dx(0, g.dy()); g.dx(1, -g.dy()); },
   .samples = {"Sub(f32[2,3], f32[2,3])", "Sub(f32[2,1,3], f32[4,1])"}},

  {.name = "Mul",
   .signature = "(a: number, b: number) -> y",
   .traits = binary(),
   .onnx = {.since = 7},
   .infer = broadcast_inputs,
   .fold_dims = fold_with([](std::span<const Dim> v) { return std::optional<Dim>(v[0] * v[1]); }),
   .gradient = [](Gradient& g) { g.dx(0, g.dy() * g.x(1)); g.dx(1, g.dy() * g.x(0)); },
   .samples = {"Mul(f32[2,3], f32[2,3])", "Mul(f32[2,1,3], f32[4,1])", "Mul(f32[2,3,2,2], f32[2,3,1,1])"}},

  {.name = "Div",  // integers: truncates
   .signature = "(a: number, b: number) -> y",
   .traits = binary(),
   .onnx = {.since = 7},
   .infer = broadcast_inputs,
   .fold_dims = fold_div,
   .gradient = [](Gradient& g) { const Expr q = g.dy() / g.x(1); g.dx(0, q); g.dx(1, -(q * g.y())); },
   .samples = {"Div(f32[2,3], f32[2,3] in (0.3, 2))", "Div(f32[2,1,3], f32[4,1] in (0.3, 2))"}},

  {.name = "Pow",
   .signature = "(x: float, e: float) -> y",
   .traits = binary(),
   .onnx = {.since = 7, .import = import_pow},
   .infer = broadcast_inputs,
   .gradient = pow_gradient,
   .samples = {"Pow(f32[2,3] in (0.3, 2), f32[2,3])", "Pow(f32[2,3] in (0.3, 2), f32[1])"}},

  {.name = "Max",
   .signature = "(a: number, b: number) -> y",
   .traits = binary(),
   .onnx = {.since = 8, .import = import_chain("Max")},
   .infer = broadcast_inputs,
   .fold_dims = fold_extreme(1),
   .gradient = extreme_gradient,
   .samples = {"Max(f32[2,3], f32[2,3])", "Max(f32[2,3], f32[1])"}},

  {.name = "Min",
   .signature = "(a: number, b: number) -> y",
   .traits = binary(),
   .onnx = {.since = 8, .import = import_chain("Min")},
   .infer = broadcast_inputs,
   .fold_dims = fold_extreme(-1),
   .gradient = extreme_gradient,
   .samples = {"Min(f32[2,3], f32[2,3])", "Min(f32[2,3], f32[1])"}},

  {.name = "Sum",
   .signature = "(xs...: number) -> y",
   .onnx = {.since = 8, .import = import_chain("Add")},
   .infer = broadcast_inputs,
   .decompose = [](Compose& c) {
     Expr y = c.x(0);
     for (std::size_t i = 1; i < c.count(); ++i) y = y + c.x(i);
     c.y(y);
   },
   .gradient = from_decomposition,
   .samples = {"Sum(f32[2,3], f32[3], f32[2,1])", "Sum(f32[2,3])"}},

  {.name = "Equal",
   .signature = "(a: any, b: any) -> y",
   .onnx = {.since = 7},
   .infer = compare_infer,
   .fold_dims = fold_with(fold_equal),
   .gradient = zero_almost_everywhere,
   .samples = {"Equal(i64[2]=[1,2], i64[]=[2])", "Equal(f32[2,3], f32[3])"}},

  {.name = "Less",
   .signature = "(a: number, b: number) -> y",
   .onnx = {.since = 7},
   .infer = compare_infer,
   .gradient = zero_almost_everywhere,
   .samples = {"Less(f32[2,3], f32[3])"}},

  {.name = "Greater",
   .signature = "(a: number, b: number) -> y",
   .onnx = {.since = 7},
   .infer = compare_infer,
   .gradient = zero_almost_everywhere,
   .samples = {"Greater(f32[2,3], f32[3])"}},

  {.name = "And",
   .signature = "(a: bool, b: bool) -> y",
   .traits = binary(),
   .onnx = {.since = 7},
   .infer = broadcast_inputs,
   .gradient = zero_almost_everywhere,
   .samples = {"And(bool[2,3], bool[3])"}},

  {.name = "Or",
   .signature = "(a: bool, b: bool) -> y",
   .traits = binary(),
   .onnx = {.since = 7},
   .infer = broadcast_inputs,
   .gradient = zero_almost_everywhere,
   .samples = {"Or(bool[2,3], bool[3])"}},

  {.name = "Where",
   .signature = "(condition: bool, a: any, b: any) -> y",
   .onnx = {.since = 9},
   .infer = where_infer,
   .fold_dims = fold_with(fold_where),
   .gradient = where_gradient,
   .samples = {"Where(bool[2,3], f32[2,3], f32[2,3])", "Where(bool[3], f32[2,1], f32[])"}},
  };
}
// clang-format on

std::span<const OpDef> elementwise_ops() {
  static const std::vector<OpDef> ops = [] {
    std::vector<OpDef> all = unary_ops();
    for (OpDef& op : binary_ops()) all.push_back(std::move(op));
    return all;
  }();
  return ops;
}

}  // namespace onnxddp

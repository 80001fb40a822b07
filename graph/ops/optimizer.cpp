// Parameter updates: PyTorch's formulas. Their decompositions are the definition; devices have fused kernels.
#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

/// Number k of the hyper-parameter row, as a scalar in double.
Expr hyper(const Compose& c, std::int64_t k) { return reshape(slice(c.x(2), 0, k, k + 1), {}); }

/// A scalar in the parameter's type.
Expr in_type(const Compose& c, Expr scalar) { return cast(scalar, c.type(0).dtype); }

void check_state(const Inference& i, std::size_t from) {
  constexpr std::string_view kWhat = "must have the parameter's type";
  i.require(i.x(1) == i.x(0), "the gradient ", kWhat);
  for (std::size_t k = from; k < i.count(); ++k)
    i.require(!i.has(k) || i.x(k) == i.x(0), "optimizer state ", kWhat);
}

void require_columns(const Inference& i, std::int64_t count) {
  i.require(i.x(2) == TensorType{DType::f64, {count}}, "hyper-parameters must be f64[", count, "]");
}

// ---- SGD: hyper = lr, step, momentum, dampening, weight_decay

void sgd_infer(Inference& i) {
  require_columns(i, 5);
  check_state(i, 3);
  i.y(i.x(0));
  if (i.has(3)) i.y(i.x(0));
}

void sgd_decompose(Compose& c) {
  const Expr p = c.x(0), momentum = in_type(c, hyper(c, 2));
  Expr g = c.x(1) + in_type(c, hyper(c, 4)) * p;
  if (c.has(3)) {
    const Expr first = call("Equal", {hyper(c, 1), c.builder().scalar(DType::f64, 1)});
    const Expr moved = momentum * c.x(3) + in_type(c, 1 - hyper(c, 3)) * g;
    const Expr velocity = call("Where", {first, g, moved});
    c.y(1, velocity);
    g = c.flag("nesterov") ? g + momentum * velocity : velocity;
  }
  c.y(0, p - in_type(c, hyper(c, 0)) * g);
}

// ---- Adam, AdamW: hyper = lr, step, beta1, beta2, eps, weight_decay

void adam_infer(Inference& i) {
  require_columns(i, 6);
  check_state(i, 3);
  for (std::size_t k = 0; k < (i.has(5) ? 4 : 3); ++k) i.y(i.x(0));
}

/// 1 - beta^step, in double.
Expr bias_correction(Expr beta, Expr step) { return 1 - call("Pow", {beta, step}); }

void adam_decompose(Compose& c) {
  const Expr lr = hyper(c, 0), step = hyper(c, 1), beta1 = hyper(c, 2), beta2 = hyper(c, 3),
             decay = hyper(c, 5);
  Expr p = c.x(0), g = c.x(1);
  if (c.flag("decoupled"))
    p = p * in_type(c, 1 - lr * decay);
  else
    g = g + in_type(c, decay) * p;
  const Expr m = c.x(3) + (g - c.x(3)) * in_type(c, 1 - beta1);
  const Expr v = c.x(4) * in_type(c, beta2) + in_type(c, 1 - beta2) * (g * g);
  Expr largest = v;
  if (c.has(5)) {
    largest = call("Max", {c.x(5), v});
    c.y(3, largest);
  }
  const Expr denominator =
      sqrt(largest) / in_type(c, sqrt(bias_correction(beta2, step))) + in_type(c, hyper(c, 4));
  c.y(0, p - in_type(c, lr / bias_correction(beta1, step)) * (m / denominator));
  c.y(1, m);
  c.y(2, v);
}

}  // namespace

// clang-format off
std::span<const OpDef> optimizer_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "SgdUpdate",
   .signature = "(p: float, g: float, hyper: float, velocity?: float) -> p.next, velocity.next?",
   .attrs = {{"nesterov", 0}},
   .traits = {.in_place = {{0, 0}, {3, 1}}},
   .onnx = {},
   .infer = sgd_infer,
   .decompose = sgd_decompose,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return (i.has(3) ? 8 : 4) * numel(i.shape(0)); },
   .samples = {"SgdUpdate(f32[2,3], f32[2,3], f64[5]=[0.1,1,0,0,0.01])",
               "SgdUpdate(f32[2,3], f32[2,3], f64[5]=[0.1,1,0.9,0.2,0.01], f32[2,3])",
               "SgdUpdate(f32[2,3], f32[2,3], f64[5]=[0.1,2,0.9,0.2,0.01], f32[2,3])",
               "SgdUpdate(f32[7], f32[7], f64[5]=[0.1,3,0.9,0,0], f32[7]) {nesterov=1}"}},

  {.name = "AdamUpdate",
   .signature = "(p: float, g: float, hyper: float, m: float, v: float, vmax?: float) -> p.next, m.next, v.next, vmax.next?",
   .attrs = {{"decoupled", 0}},
   .traits = {.in_place = {{0, 0}, {3, 1}, {4, 2}, {5, 3}}},
   .onnx = {},
   .infer = adam_infer,
   .decompose = adam_decompose,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return 12 * numel(i.shape(0)); },
   .samples = {"AdamUpdate(f32[2,3], f32[2,3], f64[6]=[0.1,1,0.9,0.999,1e-08,0.01], f32[2,3], f32[2,3] in (0.1, 1))",
               "AdamUpdate(f32[2,3], f32[2,3], f64[6]=[0.1,7,0.9,0.99,1e-08,0.01], f32[2,3], f32[2,3] in (0.1, 1)) {decoupled=1}",
               "AdamUpdate(f32[5], f32[5], f64[6]=[0.1,3,0.9,0.99,1e-08,0], f32[5], f32[5] in (0.1, 1), f32[5] in (0.1, 1))"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

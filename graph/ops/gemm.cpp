// Matrix products.
#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

// ---- MatMul

void matmul_infer(Inference& i) {
  const Shape &a = i.shape(0), &b = i.shape(1);
  i.require(i.x(0).dtype == i.x(1).dtype, "the element types differ");
  i.require(a.size() >= 2 && b.size() >= 2, "both operands need at least 2 dimensions");
  i.require(!differ(a.back(), b[b.size() - 2]), "inner sizes ", a.back(), " and ", b[b.size() - 2],
            " differ");
  Shape y;
  try {
    y = broadcast(Shape(a.begin(), a.end() - 2), Shape(b.begin(), b.end() - 2));
  } catch (const Error& error) {
    i.fail(error.what());
  }
  y.push_back(a[a.size() - 2]);
  y.push_back(b.back());
  i.y({i.x(0).dtype, y});
}

Expr swap_last(Expr x) {
  Ints perm = all_axes(x.rank());
  std::swap(perm[perm.size() - 1], perm[perm.size() - 2]);
  return transpose(x, perm);
}

/// All axes but the last as one.
Expr rows(Expr x) {
  const Shape shape(x.shape().begin(), x.shape().end() - 1);
  return reshape(x, {numel(shape), x.shape().back()});
}

void matmul_gradient(Gradient& g) {
  const Expr a = g.x(0), b = g.x(1), dy = g.dy();
  if (b.rank() == 2) {  // one product instead of a batch that is summed afterwards
    g.dx(0, reshape(gemm(rows(dy), b, false, true), a.shape()));
    g.dx(1, gemm(rows(a), rows(dy), true, false));
    return;
  }
  g.dx(0, matmul(dy, swap_last(b)));
  g.dx(1, matmul(swap_last(a), dy));
}

Dim matmul_flops(const Inference& i) {
  Shape y = broadcast(Shape(i.shape(0).begin(), i.shape(0).end() - 2),
                      Shape(i.shape(1).begin(), i.shape(1).end() - 2));
  return 2 * numel(y) * i.shape(0)[i.rank(0) - 2] * i.shape(0).back() * i.shape(1).back();
}

void import_matmul(OnnxNode& n) {
  Expr a = n.x(0), b = n.x(1);
  const bool vector_a = a.rank() == 1, vector_b = b.rank() == 1;
  if (a.rank() == 0 || b.rank() == 0) throw Error("MatMul of a scalar");
  if (!vector_a && !vector_b) return n.y(matmul(a, b));
  if (vector_a) a = reshape(a, {1, a.shape()[0]});
  if (vector_b) b = reshape(b, {b.shape()[0], 1});
  const Expr y = matmul(a, b);
  Shape shape = y.shape();
  if (vector_b) shape.pop_back();
  if (vector_a) shape.erase(shape.end() - (vector_b ? 1 : 2));
  n.y(reshape(y, shape));
}

// ---- Gemm

struct GemmSizes {
  Dim m, n, k, k_of_b;
};

GemmSizes gemm_sizes(const Inference& i) {
  const bool ta = i.flag("transA"), tb = i.flag("transB");
  const Shape &a = i.shape(0), &b = i.shape(1);
  i.require(a.size() == 2 && b.size() == 2, "A and B must be matrices");
  return {a[ta ? 1 : 0], b[tb ? 0 : 1], a[ta ? 0 : 1], b[tb ? 1 : 0]};
}

void gemm_infer(Inference& i) {
  const GemmSizes s = gemm_sizes(i);
  i.require(i.x(0).dtype == i.x(1).dtype && (!i.has(2) || i.x(2).dtype == i.x(0).dtype),
            "the element types differ");
  i.require(!differ(s.k, s.k_of_b), "inner sizes ", s.k, " and ", s.k_of_b, " differ");
  const Shape y{s.m, s.n};
  if (i.has(2)) {
    Shape with_c;
    try {
      with_c = broadcast(i.shape(2), y);
    } catch (const Error& error) {
      i.fail(error.what());
    }
    i.require(with_c == y, "C ", shape_str(i.shape(2)), " does not broadcast to ", shape_str(y));
  }
  i.y({i.x(0).dtype, y});
}

Expr scaled(Expr x, double factor) { return factor == 1 ? x : x * factor; }

void gemm_gradient(Gradient& g) {
  const bool ta = g.flag("transA"), tb = g.flag("transB");
  const Expr a = g.x(0), b = g.x(1), dy = scaled(g.dy(), g.number("alpha"));
  g.dx(0, ta ? gemm(b, dy, tb, true) : gemm(dy, b, false, !tb));
  g.dx(1, tb ? gemm(dy, a, true, ta) : gemm(a, dy, !ta, false));
  if (g.has(2)) g.dx(2, scaled(g.dy(), g.number("beta")));
}

void gemm_decompose(Compose& c) {
  const Expr a = c.flag("transA") ? transpose(c.x(0), {1, 0}) : c.x(0);
  const Expr b = c.flag("transB") ? transpose(c.x(1), {1, 0}) : c.x(1);
  Expr y = scaled(matmul(a, b), c.number("alpha"));
  if (c.has(2)) y = y + scaled(c.x(2), c.number("beta"));
  c.y(y);
}

Dim gemm_flops(const Inference& i) {
  const GemmSizes s = gemm_sizes(i);
  return 2 * s.m * s.n * s.k;
}

}  // namespace

// clang-format off
std::span<const OpDef> gemm_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "MatMul",
   .signature = "(a: float, b: float) -> y",
   .onnx = {.since = 1, .import = import_matmul},
   .infer = matmul_infer,
   .gradient = matmul_gradient,
   .flops = matmul_flops,
   .samples = {"MatMul(f32[2,3], f32[3,4])", "MatMul(f32[2,5,2,3], f32[2,5,3,4])", "MatMul(f32[5,2,3], f32[2,1,3,4])",
               "MatMul(f32[2,2,3], f32[3,4])", "MatMul(f32[2,3], f32[2,3,4])"}},

  {.name = "Gemm",
   .signature = "(a: float, b: float, c?: float) -> y",
   .attrs = {{"alpha", 1.0}, {"beta", 1.0}, {"transA", 0}, {"transB", 0}},
   .onnx = {.since = 7},
   .infer = gemm_infer,
   .decompose = gemm_decompose,
   .gradient = gemm_gradient,
   .flops = gemm_flops,
   .samples = {"Gemm(f32[2,3], f32[3,4])", "Gemm(f32[2,3], f32[4,3], f32[4]) {transB=1}",
               "Gemm(f32[3,2], f32[3,4], f32[2,1]) {transA=1}", "Gemm(f32[3,2], f32[4,3], f32[1,4]) {transA=1, transB=1}",
               "Gemm(f32[2,3], f32[3,4], f32[2,4]) {alpha=0.5, beta=2.0}", "Gemm(f32[2,3], f32[3,4], f32[])"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

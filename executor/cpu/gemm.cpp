// MatMul and Gemm: oneDNN for f32 of some size, plain loops for f64 and for products so small that a call
// costs more.
#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

/// Multiplications below which the plain loops win over oneDNN (kernels_bench, BM_SmallProduct).
constexpr std::int64_t kSmall = 4096;

/// One matrix product y[m,n] = a[m,k] b[k,n] through strides; y is row-major and dense.
struct Product {
  std::int64_t m, n, k;
  std::int64_t am, ak, bk, bn;
};

/// Rows [begin, end) of the product. Where b's rows are contiguous a row of y is summed up from rows of b,
/// else from dot products.
template <class T>
void product_rows(const Product& p, const T* a, const T* b, T* y, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    T* row = y + i * p.n;
    const T* left = a + i * p.am;
    if (p.bn == 1 && p.n > 1) {
      std::fill(row, row + p.n, T(0));
      for (std::int64_t k = 0; k < p.k; ++k) {
        const T factor = left[k * p.ak];
        const T* right = b + k * p.bk;
#pragma omp simd
        for (std::int64_t j = 0; j < p.n; ++j) row[j] += factor * right[j];
      }
      continue;
    }
    for (std::int64_t j = 0; j < p.n; ++j) {
      const T* right = b + j * p.bn;
      double total = 0;
      for (std::int64_t k = 0; k < p.k; ++k)
        total += static_cast<double>(left[k * p.ak]) * static_cast<double>(right[k * p.bk]);
      row[j] = static_cast<T>(total);
    }
  }
}

template <class T>
void product(const Product& p, const T* a, const T* b, T* y, int threads) {
  parallel_for(threads, p.m, grain_of(p.n * p.k),
               [&](std::int64_t begin, std::int64_t end) { product_rows(p, a, b, y, begin, end); });
}

/// numpy's matmul: matrices in the last two axes, the others broadcast.
template <class T>
Run matmul_loops(const PlanContext& c) {
  const SlotType &a = c.inputs[0], &b = c.inputs[1], &y = c.outputs[0];
  const std::size_t rank = y.shape.size();
  const Ints as = broadcast_strides(a, y.shape), bs = broadcast_strides(b, y.shape), ys = y.strides();
  const std::int64_t k = a.shape.back();
  const Product p{y.shape[rank - 2], y.shape[rank - 1], k, k, 1, b.shape.back(), 1};
  Nest<3> batch;
  for (std::size_t d = 0; d + 2 < rank; ++d) batch.axes.push_back({y.shape[d], {ys[d], as[d], bs[d]}});
  batch.simplify();
  return [=, threads = c.threads](const RunContext& r) {
    if (batch.axes.empty()) {
      product(p, r.in<T>(0), r.in<T>(1), r.out<T>(0), threads);
      return;
    }
    parallel_for(threads, batch.count(), grain_of(p.m * p.n * p.k),
                 [&](std::int64_t begin, std::int64_t end) {
                   batch.each(begin, end, [&](const auto& at) {
                     product_rows(p, r.in<T>(0) + at[1], r.in<T>(1) + at[2], r.out<T>(0) + at[0], 0, p.m);
                   });
                 });
  };
}

template <class T>
Run gemm_loops(const PlanContext& c) {
  const Ints &a = c.inputs[0].shape, &b = c.inputs[1].shape;
  const bool ta = c.flag("transA"), tb = c.flag("transB");
  const Product p{ta ? a[1] : a[0], tb ? b[0] : b[1], ta ? a[0] : a[1], ta ? 1 : a[1],
                  ta ? a[1] : 1,    tb ? 1 : b[1],    tb ? b[1] : 1};
  return [=, threads = c.threads](const RunContext& r) {
    product(p, r.in<T>(0), r.in<T>(1), r.out<T>(0), threads);
  };
}

/// y = alpha*y + beta*c behind a product.
template <class T>
Run with_addend(const PlanContext& c, Run product_run) {
  const T alpha = static_cast<T>(c.number("alpha")), beta = static_cast<T>(c.number("beta"));
  const bool addend = c.has(2);
  if (alpha == T(1) && !addend) return product_run;
  const Ints& y = c.outputs[0].shape;
  const Ints strides = addend ? broadcast_strides(c.inputs[2], y) : Ints{0, 0};
  return [=, run = std::move(product_run), m = y[0], n = y[1]](const RunContext& r) {
    run(r);
    T* out = r.out<T>(0);
    const T* more = addend ? r.in<T>(2) : nullptr;
    for (std::int64_t i = 0; i < m; ++i) {
      T* row = out + i * n;
      const T* right = more ? more + i * strides[0] : nullptr;
      if (right && strides[1] == 1) {
#pragma omp simd
        for (std::int64_t j = 0; j < n; ++j) row[j] = alpha * row[j] + beta * right[j];
      } else {
        const T term = right ? beta * *right : T(0);
        for (std::int64_t j = 0; j < n; ++j) row[j] = alpha * row[j] + term;
      }
    }
  };
}

/// y is empty, or a sum over nothing: oneDNN is not asked.
bool is_small(const PlanContext& c, std::int64_t k) { return c.outputs[0].numel() * k <= kSmall; }

Run prepare_matmul(PlanContext& c) {
  if (c.inputs[0].dtype == DType::f64) return matmul_loops<double>(c);
  if (!is_small(c, c.inputs[0].shape.back())) {
    if (Run run = dnnl_matmul(c)) return run;
  }
  return matmul_loops<float>(c);
}

Run prepare_gemm(PlanContext& c) {
  if (c.inputs[0].dtype == DType::f64) return with_addend<double>(c, gemm_loops<double>(c));
  const std::int64_t k = c.inputs[0].shape[c.flag("transA") ? 0 : 1];
  if (is_small(c, k)) return with_addend<float>(c, gemm_loops<float>(c));
  const bool bias = c.has(2) && c.number("alpha") == 1.0 && c.number("beta") == 1.0 &&
                    c.inputs[2].shape.size() >= 1 && c.inputs[2].numel() == c.outputs[0].shape[1] &&
                    c.inputs[2].shape.back() == c.outputs[0].shape[1];
  Run run = dnnl_gemm(c, bias);
  if (run && bias) return run;
  return with_addend<float>(c, run ? std::move(run) : gemm_loops<float>(c));
}

}  // namespace

void add_products(KernelTable& table) {
  add(table, {"MatMul", kFloats, LayoutRule::dense, prepare_matmul});
  add(table, {"Gemm", kFloats, LayoutRule::dense, prepare_gemm});
}

}  // namespace onnxddp::cpu

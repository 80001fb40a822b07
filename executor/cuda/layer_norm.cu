// Layer norm over rows and its gradient.
#include "executor/cuda/channel_sums.h"
#include "executor/cuda/kernels.h"
#include "executor/cuda/rows.h"

namespace onnxddp::cuda {
namespace {

template <int kGroup, class T>
__global__ void __launch_bounds__(kRowThreads<kGroup>)
    layer_norm_kernel(const T* x, const float* scale, const float* bias, float epsilon, T* y, float* means,
                      float* rstds, std::int64_t rows, std::int64_t n) {
  using Group = RowGroup<kGroup>;
  const std::int64_t row = Group::row();
  if (row >= rows) return;
  x += row * n;
  y += row * n;
  const float origin = n > 0 ? load(x[0]) : 0.0f;  // sums of deviations from it do not cancel
  float sum = 0, squares = 0;
  for (std::int64_t i = Group::lane(); i < n; i += kGroup) sum += load(x[i]) - origin;
  const float mean = origin + Group::sum(sum) / static_cast<float>(n);
  for (std::int64_t i = Group::lane(); i < n; i += kGroup) {
    const float d = load(x[i]) - mean;
    squares += d * d;
  }
  const float rstd = 1.0f / sqrtf(Group::sum(squares) / static_cast<float>(n) + epsilon);
  for (std::int64_t i = Group::lane(); i < n; i += kGroup)
    y[i] = store<T>((load(x[i]) - mean) * rstd * scale[i] + (bias == nullptr ? 0.0f : bias[i]));
  if (Group::lane() == 0) {
    means[row] = mean;
    rstds[row] = rstd;
  }
}

/// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * scale.
template <int kGroup, class T>
__global__ void __launch_bounds__(kRowThreads<kGroup>)
    layer_norm_grad_kernel(const T* dy, const T* x, const float* scale, const float* means,
                           const float* rstds, T* dx, std::int64_t rows, std::int64_t n) {
  using Group = RowGroup<kGroup>;
  const std::int64_t row = Group::row();
  if (row >= rows) return;
  const float mean = means[row], rstd = rstds[row];
  const std::int64_t start = row * n;
  float sum = 0, products = 0;
  for (std::int64_t i = Group::lane(); i < n; i += kGroup) {
    const float g = load(dy[start + i]) * scale[i];
    sum += g;
    products += g * (load(x[start + i]) - mean);
  }
  const float average = Group::sum(sum) / static_cast<float>(n);
  const float slope = Group::sum(products) * rstd / static_cast<float>(n);
  for (std::int64_t i = Group::lane(); i < n; i += kGroup) {
    const float g = load(dy[start + i]) * scale[i], xhat = (load(x[start + i]) - mean) * rstd;
    dx[start + i] = store<T>(rstd * (g - average - xhat * slope));
  }
}

template <class T>
struct ParameterTerm {
  const T *dy, *x;
  const float *mean, *rstd;
  __device__ void operator()(std::int64_t at, std::int64_t row, std::int64_t, float& a, float& b) const {
    a = load(dy[at]);
    b = a * (load(x[at]) - mean[row]) * rstd[row];
  }
};
__global__ void __launch_bounds__(kThreads)
    parameter_sums_kernel(const SumPair* partial, int parts, std::int64_t c, float* dbias, float* dscale) {
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    const SumPair total = channel_total(partial, parts, c, k);
    if (dbias != nullptr) dbias[k] = static_cast<float>(total.a);
    dscale[k] = static_cast<float>(total.b);
  }
}

Channels columns(std::int64_t rows, std::int64_t n) { return {true, n, rows, 1}; }

}  // namespace

void layer_norm(DType dtype, const void* in, const float* scale, const float* bias, double epsilon, void* out,
                float* mean, float* rstd, std::int64_t rows, std::int64_t n, cudaStream_t stream) {
  with_float("layer_norm", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    T* y = static_cast<T*>(out);
    with_group(n, 1, [&](auto group) {
      launch("layer_norm", layer_norm_kernel<group, T>, row_grid<group>(rows), dim3(kRowThreads<group>), 0,
             stream,
             {reads(x, rows * n), reads(scale, n), maybe_reads(bias, n), writes(y, rows * n),
              writes(mean, rows), writes(rstd, rows)},
             x, scale, bias, epsilon, y, mean, rstd, rows, n);
    });
  });
}

std::size_t layer_norm_grad_scratch_bytes(std::int64_t rows, std::int64_t n) {
  return channel_sums_bytes(columns(rows, n));
}

void layer_norm_grad(DType dtype, const void* dy_in, const void* x_in, const float* scale, const float* mean,
                     const float* rstd, void* out, float* dscale, float* dbias, std::int64_t rows,
                     std::int64_t n, void* scratch, cudaStream_t stream) {
  const ChannelSpread s = spread_channels(columns(rows, n));
  SumPair* partial = static_cast<SumPair*>(scratch);
  with_float("layer_norm_grad", dtype, [&](auto element) {
    using T = decltype(element);
    const T* dy = static_cast<const T*>(dy_in);
    const T* x = static_cast<const T*>(x_in);
    T* dx = static_cast<T*>(out);
    // The parameters first: dx may lie on top of an operand.
    launch_channel_sums("layer_norm_parameters", s, ParameterTerm<T>{dy, x, mean, rstd},
                        {reads(dy, rows * n), reads(x, rows * n), reads(mean, rows), reads(rstd, rows)},
                        partial, stream);
    launch("layer_norm_parameters_finish", parameter_sums_kernel, grid_for(n), dim3(kThreads), 0, stream,
           {reads(partial, s.parts * n), maybe_writes(dbias, n), writes(dscale, n)}, partial, s.parts, n,
           dbias, dscale);
    with_group(n, 1, [&](auto group) {
      launch("layer_norm_grad", layer_norm_grad_kernel<group, T>, row_grid<group>(rows),
             dim3(kRowThreads<group>), 0, stream,
             {reads(dy, rows * n), reads(x, rows * n), reads(scale, n), reads(mean, rows), reads(rstd, rows),
              writes(dx, rows * n)},
             dy, x, scale, mean, rstd, dx, rows, n);
    });
  });
}

}  // namespace onnxddp::cuda

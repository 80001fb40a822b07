// Batch normalisation in parts: statistics, their merge over ranks, application, gradient.
#include "executor/cuda/channel_sums.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {
namespace {

/// Packed statistics: mean[C], M2[C], count in two numbers.
__device__ inline double count_of(const float* stats, std::int64_t c) {
  return static_cast<double>(stats[2 * c]) * 1048576.0 + static_cast<double>(stats[2 * c + 1]);
}
__device__ inline void write_count(float* stats, std::int64_t c, std::int64_t count) {
  stats[2 * c] = static_cast<float>(count >> 20);
  stats[2 * c + 1] = static_cast<float>(count & 0xFFFFF);
}
__device__ inline double deviation_of(const float* stats, std::int64_t c, std::int64_t k, double epsilon) {
  return 1.0 / sqrt(static_cast<double>(stats[c + k]) / count_of(stats, c) + epsilon);
}

/// Deviations from the channel's first element: of the size of the spread, so that nothing cancels.
template <class T>
struct StatsTerm {
  const T* x;
  std::int64_t size;
  __device__ void operator()(std::int64_t at, std::int64_t, std::int64_t k, float& a, float& b) const {
    a = load(x[at]) - load(x[k * size]);
    b = a * a;
  }
};
template <class T>
__global__ void __launch_bounds__(kThreads)
    stats_kernel(const T* x, ChannelSpread s, const SumPair* partial, float* stats) {
  for (std::int64_t k = first_item(); k < s.c; k += item_step()) {
    const SumPair total = channel_total(partial, s.parts, s.c, k);
    const double count = static_cast<double>(s.count);
    const bool any = s.count > 0;
    const float origin = any ? load(x[k * s.size.divisor()]) : 0.0f;
    stats[k] = any ? static_cast<float>(static_cast<double>(origin) + total.a / count) : 0.0f;
    const double m2 = any ? total.b - total.a * total.a / count : 0.0;
    stats[s.c + k] = static_cast<float>(m2 < 0 ? 0 : m2);
  }
  if (first_item() == 0) write_count(stats, s.c, s.count);
}

__global__ void __launch_bounds__(kThreads)
    fixed_stats_kernel(const float* mean, const float* var, float* stats, std::int64_t c) {
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    stats[k] = mean[k];
    stats[c + k] = var[k];
  }
  if (first_item() == 0) write_count(stats, c, 1);
}

__global__ void __launch_bounds__(kThreads)
    merge_stats_kernel(const float* gathered, float* stats, std::int64_t ranks, std::int64_t c) {
  const std::int64_t width = 2 * c + 2;
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    double mean = 0, m2 = 0, count = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const float* s = gathered + rank * width;
      const double own = count_of(s, c);
      if (own == 0) continue;
      const double delta = static_cast<double>(s[k]) - mean, both = count + own;
      mean += delta * (own / both);
      m2 += static_cast<double>(s[c + k]) + delta * delta * (count * own / both);
      count = both;
    }
    stats[k] = static_cast<float>(mean);
    stats[c + k] = static_cast<float>(m2);
  }
  if (first_item() != 0) return;
  std::int64_t total = 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank)
    total += static_cast<std::int64_t>(count_of(gathered + rank * width, c));
  write_count(stats, c, total);
}

__global__ void __launch_bounds__(kThreads)
    running_stats_kernel(const float* mean, const float* var, const float* stats, double momentum,
                         bool unbiased, float* next_mean, float* next_var, std::int64_t c) {
  const double count = count_of(stats, c), less = unbiased ? count - 1.0 : count;
  const double divisor = less < 1.0 ? 1.0 : less;
  const float keep = static_cast<float>(momentum), take = static_cast<float>(1.0 - momentum);
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    const float m = mean[k], v = var[k];
    const bool any = count > 0;
    if (next_mean != nullptr) next_mean[k] = any ? m * keep + stats[k] * take : m;
    if (next_var != nullptr)
      next_var[k] =
          any ? v * keep + static_cast<float>(static_cast<double>(stats[c + k]) / divisor) * take : v;
  }
}

/// Per-channel numbers of apply and of its gradient, in rows of `stride` floats: mean, factor, shift, slope.
std::int64_t row_stride(const Channels& v) { return (v.c + 7) / 8 * 8; }

__global__ void __launch_bounds__(kThreads)
    apply_numbers_kernel(const float* scale, const float* bias, const float* stats, double epsilon,
                         std::int64_t c, std::int64_t stride, float* numbers) {
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    numbers[k] = stats[k];
    numbers[stride + k] =
        static_cast<float>(static_cast<double>(scale[k]) * deviation_of(stats, c, k, epsilon));
    numbers[2 * stride + k] = bias[k];
  }
}

__global__ void __launch_bounds__(kThreads)
    grad_numbers_kernel(const float* scale, const float* stats, double epsilon, const float* dbias,
                        const float* dscale, std::int64_t c, std::int64_t stride, float* numbers) {
  const double count = count_of(stats, c);
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    const double deviation = deviation_of(stats, c, k, epsilon);
    numbers[k] = stats[k];
    numbers[stride + k] = static_cast<float>(static_cast<double>(scale[k]) * deviation);
    numbers[2 * stride + k] =
        dbias == nullptr ? 0.0f : static_cast<float>(static_cast<double>(dbias[k]) / count);
    numbers[3 * stride + k] =
        dscale == nullptr ? 0.0f : static_cast<float>(static_cast<double>(dscale[k]) * deviation / count);
  }
}

/// Where the elements [i, i + width) lie: their first channel.
struct ChannelOf {
  Divider size, c;
  bool pixels;
  __device__ std::int64_t operator()(std::int64_t i) const {
    std::int64_t plane = pixels ? i : size.div(i);
    return c.split(plane);
  }
};

/// What channel_map_kernel computes from x, the other operand and the channel.
struct ApplyOp {
  const float* numbers;
  std::int64_t stride;
  bool add, relu;
  __device__ float operator()(float x, float other, std::int64_t k) const {
    float y = (x - numbers[k]) * numbers[stride + k] + numbers[2 * stride + k];
    if (add) y += other;
    return relu && y < 0.0f ? 0.0f : y;
  }
};
struct GradOp {
  const float* numbers;
  std::int64_t stride;
  __device__ float operator()(float x, float dy, std::int64_t k) const {
    return numbers[stride + k] *
           ((dy - numbers[2 * stride + k]) - (x - numbers[k]) * numbers[3 * stride + k]);
  }
};

/// y = op(x, other, channel); other may be null. With `vec` a vector never leaves its plane or its pixel.
template <class T, class Op>
__global__ void __launch_bounds__(kThreads)
    channel_map_kernel(const T* x, const T* other, T* y, std::int64_t n, ChannelOf channel, Op op, bool vec) {
  if (vec) {
    for (std::int64_t i = first_item() * kVec<T>; i < n; i += item_step() * kVec<T>) {
      std::int64_t k = channel(i);
      const std::int64_t advance = channel.pixels ? 1 : 0;
      Vec<T> v = load_vec(x + i), o = v;
      if (other != nullptr) o = load_vec(other + i);
      ONNXDDP_UNROLL
      for (int j = 0; j < kVec<T>; ++j, k += advance) v.v[j] = store<T>(op(load(v.v[j]), load(o.v[j]), k));
      store_vec(y + i, v);
    }
    return;
  }
  for (std::int64_t i = first_item(); i < n; i += item_step())
    y[i] = store<T>(op(load(x[i]), other == nullptr ? 0.0f : load(other[i]), channel(i)));
}

template <class T, class Op>
void launch_map(const char* name, const Channels& v, const T* x, const T* other, T* y, const Op& op,
                std::int64_t rows, cudaStream_t stream) {
  const std::int64_t n = v.c * v.count();
  const bool vec = (v.pixels ? v.c : v.size) % kVec<T> == 0 && vector_aligned(x, other, y);
  launch(name, channel_map_kernel<T, Op>, grid_for(vec ? n / kVec<T> : n), dim3(kThreads), 0, stream,
         {reads(x, n), maybe_reads(other, n), writes(y, n), reads(op.numbers, (rows - 1) * op.stride + v.c)},
         x, other, y, n, ChannelOf{Divider(v.size), Divider(v.c), v.pixels}, op, vec);
}

template <class T>
struct GradTerm {
  const T *dy, *x;
  const float* mean;
  __device__ void operator()(std::int64_t at, std::int64_t, std::int64_t k, float& a, float& b) const {
    a = load(dy[at]);
    b = a * (load(x[at]) - mean[k]);
  }
};
__global__ void __launch_bounds__(kThreads)
    grad_sums_kernel(const SumPair* partial, int parts, const float* stats, double epsilon, std::int64_t c,
                     float* dbias, float* dscale) {
  for (std::int64_t k = first_item(); k < c; k += item_step()) {
    const SumPair total = channel_total(partial, parts, c, k);
    if (dbias != nullptr) dbias[k] = static_cast<float>(total.a);
    if (dscale != nullptr) dscale[k] = static_cast<float>(total.b * deviation_of(stats, c, k, epsilon));
  }
}

}  // namespace

std::size_t norm_scratch_bytes(const Channels& v) {
  return std::max(channel_sums_bytes(v), static_cast<std::size_t>(row_stride(v)) * 4 * sizeof(float));
}

void batch_stats(DType dtype, const Channels& v, const void* in, float* stats, void* scratch,
                 cudaStream_t stream) {
  const ChannelSpread s = spread_channels(v);
  SumPair* partial = static_cast<SumPair*>(scratch);
  with_float("batch_stats", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    const std::int64_t n = v.c * v.count();
    launch_channel_sums("batch_stats", s, StatsTerm<T>{x, v.size}, {reads(x, n)}, partial, stream);
    launch("batch_stats_finish", stats_kernel<T>, dim3(std::max(1u, blocks_for(v.c, kThreads, kMaxBlocks))),
           dim3(kThreads), 0, stream,
           {reads(x, n), reads(partial, s.parts * v.c), writes(stats, 2 * v.c + 2)}, x, s, partial, stats);
  });
}

void fixed_stats(const float* mean, const float* var, float* stats, std::int64_t c, cudaStream_t stream) {
  launch("fixed_stats", fixed_stats_kernel, dim3(std::max(1u, blocks_for(c, kThreads, kMaxBlocks))),
         dim3(kThreads), 0, stream, {reads(mean, c), reads(var, c), writes(stats, 2 * c + 2)}, mean, var,
         stats, c);
}

void merge_stats(const float* gathered, float* stats, std::int64_t ranks, std::int64_t c,
                 cudaStream_t stream) {
  launch("merge_stats", merge_stats_kernel, dim3(std::max(1u, blocks_for(c, kThreads, kMaxBlocks))),
         dim3(kThreads), 0, stream, {reads(gathered, ranks * (2 * c + 2)), writes(stats, 2 * c + 2)},
         gathered, stats, ranks, c);
}

void running_stats(const float* mean, const float* var, const float* stats, double momentum, bool unbiased,
                   float* next_mean, float* next_var, std::int64_t c, cudaStream_t stream) {
  launch("running_stats", running_stats_kernel, grid_for(c), dim3(kThreads), 0, stream,
         {reads(mean, c), reads(var, c), reads(stats, 2 * c + 2), maybe_writes(next_mean, c),
          maybe_writes(next_var, c)},
         mean, var, stats, momentum, unbiased, next_mean, next_var, c);
}

void batch_norm_apply(DType dtype, const Channels& v, const void* in, const float* scale, const float* bias,
                      const float* stats, double epsilon, const void* add, bool relu, void* out,
                      void* scratch, cudaStream_t stream) {
  float* numbers = static_cast<float*>(scratch);
  const std::int64_t stride = row_stride(v);
  launch("batch_norm_numbers", apply_numbers_kernel, grid_for(v.c), dim3(kThreads), 0, stream,
         {reads(scale, v.c), reads(bias, v.c), reads(stats, 2 * v.c + 2), writes(numbers, 2 * stride + v.c)},
         scale, bias, stats, epsilon, v.c, stride, numbers);
  with_float("batch_norm_apply", dtype, [&](auto element) {
    using T = decltype(element);
    launch_map("batch_norm_apply", v, static_cast<const T*>(in), static_cast<const T*>(add),
               static_cast<T*>(out), ApplyOp{numbers, stride, add != nullptr, relu}, 3, stream);
  });
}

void batch_norm_grad_sums(DType dtype, const Channels& v, const void* dy_in, const void* x_in,
                          const float* stats, double epsilon, float* dbias, float* dscale, void* scratch,
                          cudaStream_t stream) {
  const ChannelSpread s = spread_channels(v);
  SumPair* partial = static_cast<SumPair*>(scratch);
  with_float("batch_norm_grad_sums", dtype, [&](auto element) {
    using T = decltype(element);
    const T* dy = static_cast<const T*>(dy_in);
    const T* x = static_cast<const T*>(x_in);
    const std::int64_t n = v.c * v.count();
    launch_channel_sums("batch_norm_grad_sums", s, GradTerm<T>{dy, x, stats},
                        {reads(dy, n), reads(x, n), reads(stats, v.c)}, partial, stream);
  });
  launch("batch_norm_grad_finish", grad_sums_kernel, grid_for(v.c), dim3(kThreads), 0, stream,
         {reads(partial, s.parts * v.c), reads(stats, 2 * v.c + 2), maybe_writes(dbias, v.c),
          maybe_writes(dscale, v.c)},
         partial, s.parts, stats, epsilon, v.c, dbias, dscale);
}

void batch_norm_grad_apply(DType dtype, const Channels& v, const void* dy, const void* x, const float* scale,
                           const float* stats, double epsilon, const float* dbias, const float* dscale,
                           void* dx, void* scratch, cudaStream_t stream) {
  float* numbers = static_cast<float*>(scratch);
  const std::int64_t stride = row_stride(v);
  launch("batch_norm_grad_numbers", grad_numbers_kernel, grid_for(v.c), dim3(kThreads), 0, stream,
         {reads(scale, v.c), reads(stats, 2 * v.c + 2), maybe_reads(dbias, v.c), maybe_reads(dscale, v.c),
          writes(numbers, 3 * stride + v.c)},
         scale, stats, epsilon, dbias, dscale, v.c, stride, numbers);
  with_float("batch_norm_grad_apply", dtype, [&](auto element) {
    using T = decltype(element);
    launch_map("batch_norm_grad_apply", v, static_cast<const T*>(x), static_cast<const T*>(dy),
               static_cast<T*>(dx), GradOp{numbers, stride}, 4, stream);
  });
}

}  // namespace onnxddp::cuda

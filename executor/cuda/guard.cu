// What watches over gradients: the sum of their squares, scaling by a device number, a flag for values that
// are not finite.
#include "executor/cuda/lists.h"

namespace onnxddp::cuda {
namespace {

/// partial[chunk] = sum of its squares.
template <class T>
__global__ void __launch_bounds__(kThreads) squares_kernel(ListView<ListEntry> list, double* partial) {
  const ChunkView<ListEntry> chunk(list);
  const T* x = static_cast<const T*>(chunk.entry.x);
  double sum = 0;
  for (std::int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += blockDim.x) {
    const double value = static_cast<double>(load(x[i]));
    sum += value * value;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    squares_sum_kernel(const double* partial, std::int64_t n, DType to, void* y) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  if (to == DType::f64)
    *static_cast<double*>(y) = sum;
  else if (to == DType::f32)
    *static_cast<float*>(y) = static_cast<float>(sum);
  else
    *static_cast<bf16*>(y) = __float2bfloat16(static_cast<float>(sum));
}

template <class T>
__global__ void __launch_bounds__(kThreads) scale_kernel(ListView<ListEntry> list, const float* factor) {
  const ChunkView<ListEntry> chunk(list);
  const T* x = static_cast<const T*>(chunk.entry.x);
  T* y = static_cast<T*>(chunk.entry.y);
  const float f = *factor;
  std::int64_t begin = chunk.begin;
  if (reinterpret_cast<std::uintptr_t>(x) % 16 == 0 && reinterpret_cast<std::uintptr_t>(y) % 16 == 0) {
    const std::int64_t vectors = (chunk.end - begin) / kVec<T>;
    for (std::int64_t w = threadIdx.x; w < vectors; w += blockDim.x) {
      Vec<T> v = load_vec(x + begin + w * kVec<T>);
      ONNXDDP_UNROLL
      for (int j = 0; j < kVec<T>; ++j) v.v[j] = store<T>(load(v.v[j]) * f);
      store_vec(y + begin + w * kVec<T>, v);
    }
    begin += vectors * kVec<T>;
  }
  for (std::int64_t i = begin + threadIdx.x; i < chunk.end; i += blockDim.x) y[i] = store<T>(load(x[i]) * f);
}

template <class T>
__global__ void __launch_bounds__(kThreads) non_finite_kernel(ListView<ListEntry> list, unsigned* flag) {
  const ChunkView<ListEntry> chunk(list);
  const T* x = static_cast<const T*>(chunk.entry.x);
  bool bad = false;
  for (std::int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += blockDim.x) {
    const float value = load(x[i]);
    bad = bad || !(value - value == 0.0f);  // infinity and NaN differ from themselves by NaN
  }
  if (__syncthreads_or(bad) && threadIdx.x == 0) atomicOr(flag, 1u);
}

template <class T>
std::vector<Range> list_ranges(const TensorList& list, bool written) {
  std::vector<Range> ranges = table_ranges(list);
  for (const ListEntry& e : list.tensors) {
    ranges.push_back(reads(static_cast<const T*>(e.x), e.n));
    if (written) ranges.push_back(writes(static_cast<T*>(e.y), e.n));
  }
  return ranges;
}

}  // namespace

std::size_t sum_squares_scratch_bytes(const TensorList& list) { return list.chunks.size() * sizeof(double); }

void sum_squares_parts(const TensorList& list, DType dtype, double* parts, cudaStream_t stream) {
  with_float("sum_squares", dtype, [&](auto element) {
    using T = decltype(element);
    std::vector<Range> ranges = list_ranges<T>(list, false);
    ranges.push_back(writes(parts, static_cast<std::int64_t>(list.chunks.size())));
    launch("sum_squares", squares_kernel<T>, list_grid(list), dim3(kThreads), 0, stream, ranges,
           view_of(list), parts);
  });
}

void sum_parts(const double* parts, std::int64_t n, DType to, void* y, cudaStream_t stream) {
  CHECK(to == DType::f64 || to == DType::f32 || to == DType::bf16, "sum_parts into dtype number ",
        static_cast<int>(to));
  const std::int64_t width = to == DType::f64 ? 8 : to == DType::f32 ? 4 : 2;
  launch("sum_parts", squares_sum_kernel, dim3(1), dim3(n > kWarp ? kThreads : kWarp), 0, stream,
         {reads(parts, n), writes(static_cast<char*>(y), width)}, parts, n, to, y);
}

void sum_squares(const TensorList& list, DType dtype, DType to, void* y, void* scratch, cudaStream_t stream) {
  double* parts = static_cast<double*>(scratch);
  sum_squares_parts(list, dtype, parts, stream);
  sum_parts(parts, static_cast<std::int64_t>(list.chunks.size()), to, y, stream);
}

void scale(const TensorList& list, DType dtype, const float* factor, cudaStream_t stream) {
  with_float("scale", dtype, [&](auto element) {
    using T = decltype(element);
    std::vector<Range> ranges = list_ranges<T>(list, true);
    ranges.push_back(reads(factor, 1));
    launch("scale", scale_kernel<T>, list_grid(list), dim3(kThreads), 0, stream, ranges, view_of(list),
           factor);
  });
}

void find_non_finite(const TensorList& list, DType dtype, unsigned* flag, cudaStream_t stream) {
  fill(flag, 1, 0, sizeof(unsigned), stream);
  with_float("find_non_finite", dtype, [&](auto element) {
    using T = decltype(element);
    std::vector<Range> ranges = list_ranges<T>(list, false);
    ranges.push_back(updates(flag, 1));
    launch("find_non_finite", non_finite_kernel<T>, list_grid(list), dim3(kThreads), 0, stream, ranges,
           view_of(list), flag);
  });
}

}  // namespace onnxddp::cuda

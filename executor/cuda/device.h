// Helpers of the .cu files: storage and compute types, dispatch over dtypes, grids, ranges of walks.
#pragma once

#include "executor/cuda/launch.h"
#include "executor/cuda/walk.h"

namespace onnxddp::cuda {

using bf16 = __nv_bfloat16;

/// The type that kernels compute in for a storage type: float for bf16, else the type itself.
template <class T>
struct ComputeOf {
  using type = T;
};
template <>
struct ComputeOf<bf16> {
  using type = float;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

/// A stored element in its compute type, and back.
template <class T>
__device__ inline Compute<T> load(T x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __bfloat162float(x);
  else
    return x;
}
template <class T>
__device__ inline T store(Compute<T> x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __float2bfloat16(x);
  else
    return x;
}

[[noreturn]] inline void unsupported(const char* kernel, DType dtype) {
  detail::check_failed("dtype", __FILE__, __LINE__, "CUDA kernel '", kernel,
                       "' has no version for dtype number ", static_cast<int>(dtype));
}

/// Calls f(T()) with the storage type of a float tensor: f32 or bf16.
template <class F>
void with_float(const char* kernel, DType dtype, const F& f) {
  if (dtype == DType::f32)
    f(float());
  else if (dtype == DType::bf16)
    f(bf16());
  else
    unsupported(kernel, dtype);
}
/// The same for f32, bf16, i64, i32.
template <class F>
void with_number(const char* kernel, DType dtype, const F& f) {
  if (dtype == DType::i64)
    f(std::int64_t());
  else if (dtype == DType::i32)
    f(std::int32_t());
  else
    with_float(kernel, dtype, f);
}

/// Threads of a block unless a kernel says otherwise, and blocks after which a grid strides.
inline constexpr int kThreads = 256;
inline constexpr unsigned kMaxBlocks = 4096;

/// Grid of a kernel whose threads stride over n items.
inline dim3 grid_for(std::int64_t n, int threads = kThreads) {
  return dim3(blocks_for(n, threads, kMaxBlocks));
}

/// This thread's first item and the distance to its next one.
__device__ inline std::int64_t first_item() { return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline std::int64_t item_step() { return std::int64_t{gridDim.x} * blockDim.x; }

/// The elements of operand k of a walk as a range.
template <class T, int K>
Range walk_reads(const T* p, const Walk<K>& walk, int k) {
  return walk.count == 0 ? reads(p, 0) : reads(p + walk.low[k], walk.high[k] - walk.low[k] + 1);
}
template <class T, int K>
Range walk_writes(T* p, const Walk<K>& walk, int k) {
  return walk.count == 0 ? writes(p, 0) : writes(p + walk.low[k], walk.high[k] - walk.low[k] + 1);
}
template <class T, int K>
Range walk_updates(T* p, const Walk<K>& walk, int k) {
  return walk.count == 0 ? updates(p, 0) : updates(p + walk.low[k], walk.high[k] - walk.low[k] + 1);
}

/// A range for a pointer that may be null.
template <class T>
Range maybe_reads(const T* p, std::int64_t n) {
  return reads(p, p == nullptr ? 0 : n);
}
template <class T>
Range maybe_writes(T* p, std::int64_t n) {
  return writes(p, p == nullptr ? 0 : n);
}

/// A fault word (kernels.h) for position `row` with `value`.
__device__ inline unsigned long long fault_word(std::int64_t row, std::int64_t value) {
  const std::int64_t low = -2147483647 - 1, high = 2147483647;
  const std::int64_t clamped = value < low ? low : value > high ? high : value;
  return (static_cast<unsigned long long>(row) << 32) | static_cast<std::uint32_t>(clamped);
}

}  // namespace onnxddp::cuda

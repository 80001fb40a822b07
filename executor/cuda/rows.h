// Kernels over rows: a row is the work of one thread, one warp or one block of 256 threads.
#pragma once

#include "executor/cuda/device.h"

namespace onnxddp::cuda {

/// Threads of a block of a row kernel with kGroup threads a row (1, 32 or 256).
template <int kGroup>
inline constexpr int kRowThreads = kGroup == 256 ? 256 : 128;

/// This thread's row, its place in it, and sums over the threads of the row (all of them must call these).
template <int kGroup>
struct RowGroup {
  __device__ static std::int64_t row() {
    return std::int64_t{blockIdx.x} * (kRowThreads<kGroup> / kGroup) + static_cast<int>(threadIdx.x) / kGroup;
  }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kGroup; }
  template <class T, class Op>
  __device__ static T combine(T value, T identity, Op op) {
    if constexpr (kGroup == 1)
      return value;
    else if constexpr (kGroup == kWarp)
      return warp_reduce(value, op);
    else
      return block_reduce(value, identity, op);
  }
  __device__ static float sum(float value) { return combine(value, 0.0f, SumOp{}); }
  __device__ static float max(float value) { return combine(value, -INFINITY, MaxOp{}); }
};

/// Grid of a row kernel.
template <int kGroup>
dim3 row_grid(std::int64_t rows) {
  constexpr int kPerBlock = kRowThreads<kGroup> / kGroup;
  return dim3(static_cast<unsigned>((rows + kPerBlock - 1) / kPerBlock));
}

/// Calls f(std::integral_constant<int, group>()) with the group for rows of n elements that are `inner`
/// apart: neighbouring threads should read neighbouring elements.
template <class F>
void with_group(std::int64_t n, std::int64_t inner, const F& f) {
  if (inner > 1 || n <= 2)
    f(std::integral_constant<int, 1>());
  else if (n <= 1024)
    f(std::integral_constant<int, kWarp>());
  else
    f(std::integral_constant<int, 256>());
}

}  // namespace onnxddp::cuda

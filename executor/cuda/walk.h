// Index arithmetic that host and kernels share: division by constants, and walks over strided operands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "executor/operands.h"
#include "executor/scalar_ops.h"
#include "graph/types.h"

#if defined(__CUDA_ARCH__)  // the host compiler does not know the pragma
#define ONNXDDP_UNROLL _Pragma("unroll")
#else
#define ONNXDDP_UNROLL
#endif

namespace onnxddp::cuda {

/// Division of non-negative numbers by a constant: one multiplication below 2^31, the plain division above.
/// (Granlund, Montgomery: Division by Invariant Integers using Multiplication; 1994.)
class Divider {
 public:
  Divider() = default;
  explicit Divider(std::int64_t divisor) : divisor_(std::max<std::int64_t>(divisor, 1)) {
    if (divisor_ >= kLimit) return;  // div divides plainly
    while ((std::int64_t{1} << shift_) < divisor_) ++shift_;
    const std::uint64_t rest = (std::uint64_t{1} << shift_) - static_cast<std::uint64_t>(divisor_);
    factor_ = static_cast<std::uint32_t>((rest << 32) / static_cast<std::uint64_t>(divisor_) + 1);
  }
  ONNXDDP_HD std::int64_t div(std::int64_t n) const {
    if (n >= kLimit || divisor_ >= kLimit) return n / divisor_;
    const std::uint32_t m = static_cast<std::uint32_t>(n);
    const std::uint32_t high = static_cast<std::uint32_t>((std::uint64_t{m} * factor_) >> 32);
    return static_cast<std::int64_t>((high + m) >> shift_);
  }
  /// Replaces n by the quotient and returns the remainder.
  ONNXDDP_HD std::int64_t split(std::int64_t& n) const {
    const std::int64_t quotient = div(n), rest = n - quotient * divisor_;
    n = quotient;
    return rest;
  }
  ONNXDDP_HD std::int64_t divisor() const { return divisor_; }

 private:
  static constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  std::int64_t divisor_ = 1;
  std::uint32_t factor_ = 1, shift_ = 0;
};

/// Axes that a walk may have after merging.
inline constexpr int kMaxAxes = 8;

/// A nest of loops over K operands by element strides. Axis 0 is the innermost. Made by make_walk.
template <int K>
struct Walk {
  std::int64_t count = 1;
  int rank = 0;
  Divider size[kMaxAxes];
  std::int64_t stride[K][kMaxAxes] = {};
  std::int64_t low[K] = {}, high[K] = {};  // least and greatest offset that occurs (count > 0)

  /// Offsets of all operands in iteration i.
  ONNXDDP_HD void at(std::int64_t i, std::int64_t (&offset)[K]) const {
    ONNXDDP_UNROLL
    for (int k = 0; k < K; ++k) offset[k] = 0;
    ONNXDDP_UNROLL
    for (int d = 0; d < kMaxAxes; ++d) {
      if (d >= rank) break;
      const std::int64_t index = d + 1 == rank ? i : size[d].split(i);
      ONNXDDP_UNROLL
      for (int k = 0; k < K; ++k) offset[k] += index * stride[k][d];
    }
  }
  /// Stride of operand k along the innermost axis (1 without axes).
  std::int64_t inner(int k) const { return rank == 0 ? 1 : stride[k][0]; }
};

/// Strides of a dense tensor.
inline Ints dense_strides(const Ints& shape) {
  Ints strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

using onnxddp::broadcast_strides;

/// A walk over `shape` with one stride list an operand. Axes of size 1 go, the rest is sorted so that operand
/// 0 moves slowest outside (zero strides outermost), and neighbours that are contiguous for all operands
/// become one. Throws InternalError if more than kMaxAxes remain.
template <int K>
Walk<K> make_walk(const Ints& shape, const std::vector<Ints>& strides) {
  struct Axis {
    std::int64_t size;
    std::int64_t stride[K];
  };
  std::vector<Axis> axes, merged;
  Walk<K> walk;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    walk.count *= shape[d];
    if (shape[d] == 1) continue;
    Axis axis{shape[d], {}};
    for (int k = 0; k < K; ++k) axis.stride[k] = strides[static_cast<std::size_t>(k)][d];
    axes.push_back(axis);
  }
  std::stable_sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
    const auto key = [](const Axis& x) { return x.stride[0] == 0 ? INT64_MAX : std::abs(x.stride[0]); };
    return key(a) > key(b);
  });
  for (const Axis& inner : axes) {
    bool fits = !merged.empty();
    for (int k = 0; fits && k < K; ++k) fits = merged.back().stride[k] == inner.stride[k] * inner.size;
    if (!fits) {
      merged.push_back(inner);
      continue;
    }
    const std::int64_t size = merged.back().size * inner.size;
    merged.back() = inner;
    merged.back().size = size;
  }
  CHECK(merged.size() <= kMaxAxes, "a kernel walks over ", merged.size(), " axes, the most are ", kMaxAxes);
  for (auto axis = merged.rbegin(); axis != merged.rend(); ++axis) {
    walk.size[walk.rank] = Divider(axis->size);
    for (int k = 0; k < K; ++k) {
      walk.stride[k][walk.rank] = axis->stride[k];
      (axis->stride[k] < 0 ? walk.low : walk.high)[k] += (axis->size - 1) * axis->stride[k];
    }
    ++walk.rank;
  }
  return walk;
}

}  // namespace onnxddp::cuda

// Loops of the CPU's kernels: splitting over threads, and nests of strided loops whose axes are sorted and
// merged.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "executor/kernel.h"
#include "executor/operands.h"

namespace onnxddp::cpu {

/// Elements of cheap work below which a thread is not worth its start.
inline constexpr std::int64_t kGrain = 32768;

/// Calls f(begin, end) on contiguous parts of [0, n), one a thread, none below `grain` items. f must not
/// throw.
template <class F>
void parallel_for(int threads, std::int64_t n, std::int64_t grain, const F& f) {
  const std::int64_t parts = std::min<std::int64_t>(threads, n / std::max<std::int64_t>(grain, 1));
  if (parts <= 1) {
    f(std::int64_t{0}, n);
    return;
  }
#ifndef __SANITIZE_THREAD__  // it cannot see how libgomp's threads synchronise: one thread there
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static)
#endif
  for (std::int64_t p = 0; p < parts; ++p) f(n * p / parts, n * (p + 1) / parts);
}

/// Items of work of `cost` elements each that make a grain.
inline std::int64_t grain_of(std::int64_t cost) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(cost, 1));
}

/// A nest of loops over K operands: one size and K strides an axis, outermost first. Without axes it runs
/// once.
template <std::size_t K>
struct Nest {
  struct Axis {
    std::int64_t size;
    std::array<std::int64_t, K> stride;
  };
  std::vector<Axis> axes;

  /// Drops axes of size 1, sorts by the stride of operand 0 (largest first, zero strides outermost), merges
  /// neighbours that are contiguous for all operands.
  void simplify() {
    std::erase_if(axes, [](const Axis& a) { return a.size == 1; });
    std::stable_sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
      const auto key = [](const Axis& x) { return x.stride[0] == 0 ? INT64_MAX : std::abs(x.stride[0]); };
      return key(a) > key(b);
    });
    std::vector<Axis> merged;
    for (const Axis& inner : axes) {
      bool fits = !merged.empty();
      for (std::size_t k = 0; fits && k < K; ++k)
        fits = merged.back().stride[k] == inner.stride[k] * inner.size;
      if (fits) {
        merged.back().size *= inner.size;
        merged.back().stride = inner.stride;
      } else {
        merged.push_back(inner);
      }
    }
    axes = std::move(merged);
  }
  std::int64_t count() const {
    std::int64_t n = 1;
    for (const Axis& a : axes) n *= a.size;
    return n;
  }
  /// The innermost axis, taken out; {1, zeros} if there is none.
  Axis take_inner() {
    if (axes.empty()) return {1, {}};
    const Axis inner = axes.back();
    axes.pop_back();
    return inner;
  }
  /// f(offsets) for iterations [begin, end) of the nest in order; offsets has one element offset per operand.
  template <class F>
  void each(std::int64_t begin, std::int64_t end, const F& f) const {
    if (begin >= end) return;
    std::array<std::int64_t, K> offset{};
    std::array<std::int64_t, 16> index{};
    std::int64_t rest = begin;
    for (std::size_t d = axes.size(); d-- > 0;) {
      index[d] = rest % axes[d].size;
      rest /= axes[d].size;
      for (std::size_t k = 0; k < K; ++k) offset[k] += index[d] * axes[d].stride[k];
    }
    for (std::int64_t i = begin;;) {
      f(offset);
      if (++i == end) return;
      for (std::size_t d = axes.size(); d-- > 0;) {
        if (++index[d] < axes[d].size) {
          for (std::size_t k = 0; k < K; ++k) offset[k] += axes[d].stride[k];
          break;
        }
        index[d] = 0;
        for (std::size_t k = 0; k < K; ++k) offset[k] -= (axes[d].size - 1) * axes[d].stride[k];
      }
    }
  }
};

/// The nest over the elements of `out`, with `in` broadcast to it. Operand 0 is the output.
template <std::size_t Inputs>
Nest<Inputs + 1> elementwise_nest(const SlotType& out, const std::array<const SlotType*, Inputs>& in) {
  CHECK(out.shape.size() <= 16, "rank above 16");
  Nest<Inputs + 1> nest;
  std::array<Ints, Inputs + 1> strides;
  strides[0] = out.strides();
  for (std::size_t k = 0; k < Inputs; ++k) strides[k + 1] = broadcast_strides(*in[k], out.shape);
  for (std::size_t d = 0; d < out.shape.size(); ++d) {
    typename Nest<Inputs + 1>::Axis axis{out.shape[d], {}};
    for (std::size_t k = 0; k <= Inputs; ++k) axis.stride[k] = strides[k][d];
    nest.axes.push_back(axis);
  }
  nest.simplify();
  return nest;
}

/// Calls f(T()) with the element type of `dtype`.
template <class F>
auto with_float(DType dtype, const F& f) {
  if (dtype == DType::f32) return f(float());
  CHECK(dtype == DType::f64, "not a float type of the kernels: ", dtype_name(dtype));
  return f(double());
}
template <class F>
auto with_number(DType dtype, const F& f) {
  if (dtype == DType::i64) return f(std::int64_t());
  if (dtype == DType::i32) return f(std::int32_t());
  return with_float(dtype, f);
}
/// Calls f with an unsigned integer as wide as an element: for kernels that only move elements.
template <class F>
auto with_width(DType dtype, const F& f) {
  switch (dtype_size(dtype)) {
    case 1: return f(std::uint8_t());
    case 2: return f(std::uint16_t());
    case 4: return f(std::uint32_t());
    default: return f(std::uint64_t());
  }
}

/// A copy through strides: out and in have the nest's two stride lists.
template <class T>
void strided_copy(T* out, const T* in, const Nest<2>& nest, const Nest<2>::Axis& inner, int threads) {
  const std::int64_t n = inner.size, so = inner.stride[0], si = inner.stride[1];
  parallel_for(threads, nest.count(), grain_of(n), [&](std::int64_t begin, std::int64_t end) {
    nest.each(begin, end, [&](const std::array<std::int64_t, 2>& at) {
      T* y = out + at[0];
      const T* x = in + at[1];
      if (so == 1 && si == 1) {
        std::copy(x, x + n, y);
      } else {
        for (std::int64_t i = 0; i < n; ++i) y[i * so] = x[i * si];
      }
    });
  });
}

/// Sum of x[0..n) in double, in 8 interleaved parts.
template <class T>
double sum_contiguous(const T* x, std::int64_t n) {
  double part[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
#pragma omp simd
    for (int j = 0; j < 8; ++j) part[j] += static_cast<double>(x[i + j]);
  }
  for (; i < n; ++i) part[i & 7] += static_cast<double>(x[i]);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

}  // namespace onnxddp::cpu

// What the kernel tests share: device tensors of any dtype at any alignment, random numbers, and comparison
// with a reference in double.
#pragma once
#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "executor/cuda/kernels.h"
#include "tests/cudaemu/conformance.h"

namespace cudaemu_test {

using onnxddp::DType;
using onnxddp::Ints;
using Doubles = std::vector<double>;

inline constexpr DType kFloats[] = {DType::f32, DType::bf16};

inline std::size_t width_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::i16: return 2;
    default: return 1;
  }
}

/// Calls f(T()) with the storage type.
template <class F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(float());
    case DType::f64: return f(double());
    case DType::bf16: return f(__nv_bfloat16());
    case DType::i64: return f(std::int64_t());
    case DType::i32: return f(std::int32_t());
    case DType::i16: return f(std::int16_t());
    case DType::i8: return f(std::int8_t());
    case DType::u8: return f(std::uint8_t());
    default: return f(bool());
  }
}
template <class T>
T to_storage(double x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}
template <class T>
double from_storage(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return static_cast<double>(__bfloat162float(x));
  else
    return static_cast<double>(x);
}

/// A device tensor whose first element lies `shift` elements behind an aligned address. Values are doubles on
/// the host.
class Tensor {
 public:
  Tensor(DType dtype, std::int64_t n, std::int64_t shift = 0)
      : dtype_(dtype),
        n_(n),
        shift_(shift),
        buffer_((n + shift + (n == 0)) * static_cast<std::int64_t>(width_of(dtype))) {}
  Tensor(DType dtype, const Doubles& values, std::int64_t shift, cudaStream_t stream)
      : Tensor(dtype, static_cast<std::int64_t>(values.size()), shift) {
    set(values, stream);
  }
  void set(const Doubles& values, cudaStream_t stream) {
    with_type(dtype_, [&](auto element) {
      using T = decltype(element);
      std::unique_ptr<T[]> stored(new T[values.size() + 1]);
      for (std::size_t i = 0; i < values.size(); ++i) stored[i] = to_storage<T>(values[i]);
      EXPECT_EQ(
          cudaMemcpyAsync(get(), stored.get(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
          cudaSuccess);
    });
  }
  void* get() const { return buffer_.get() + shift_ * static_cast<std::int64_t>(width_of(dtype_)); }
  template <class T>
  T* as() const {
    return static_cast<T*>(get());
  }
  Doubles read(cudaStream_t stream) const {
    Doubles out(static_cast<std::size_t>(n_));
    with_type(dtype_, [&](auto element) {
      using T = decltype(element);
      std::unique_ptr<T[]> stored(new T[out.size() + 1]);
      EXPECT_EQ(cudaMemcpyAsync(stored.get(), get(), out.size() * sizeof(T), cudaMemcpyDeviceToHost, stream),
                cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = from_storage(stored[i]);
    });
    return out;
  }

 private:
  DType dtype_;
  std::int64_t n_, shift_;
  Buffer<char> buffer_;
};

/// Temporary device memory that starts unwritten.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : buffer_(static_cast<std::int64_t>(bytes) + 16) {}
  void* get() const { return buffer_.get(); }

 private:
  Buffer<char> buffer_;
};

/// A fixture in all schedules and seeds, with a stream and random numbers.
class KernelTest : public ConformanceTest {
 protected:
  /// n values in [low, high), already rounded to dtype.
  Doubles random(DType dtype, std::int64_t n, double low = -2, double high = 2) {
    std::uniform_real_distribution<double> uniform(low, high);
    Doubles out(static_cast<std::size_t>(n));
    for (double& x : out)
      x = dtype == DType::boolean ? uniform(random_) > (low + high) / 2 : rounded(dtype, uniform(random_));
    return out;
  }
  static double rounded(DType dtype, double x) {
    with_type(dtype, [&](auto element) { x = from_storage(to_storage<decltype(element)>(x)); });
    return x;
  }
  std::mt19937 random_{GetParam().seed * 3 + static_cast<unsigned>(GetParam().schedule)};
  Stream stream_;
};

inline double tolerance_of(DType dtype) { return dtype == DType::bf16 ? 1.0 / 128 : 2e-5; }

/// Equal within the dtype's tolerance (times `factor`), relative above 1, absolute below; NaN equals NaN,
/// infinities themselves.
inline ::testing::AssertionResult near(DType dtype, const Doubles& actual, const Doubles& expected,
                                       double factor = 1) {
  if (actual.size() != expected.size())
    return ::testing::AssertionFailure() << "sizes " << actual.size() << ", " << expected.size();
  const double tolerance = tolerance_of(dtype) * factor;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], e = expected[i];
    if ((std::isnan(a) && std::isnan(e)) || a == e) continue;
    if (!(std::abs(a - e) <= tolerance * std::max(1.0, std::abs(e))))
      return ::testing::AssertionFailure()
             << "element " << i << " of " << actual.size() << ": " << a << " instead of " << e;
  }
  return ::testing::AssertionSuccess();
}

inline std::int64_t product(const Ints& shape) {
  std::int64_t n = 1;
  for (std::int64_t d : shape) n *= d;
  return n;
}
/// Calls f(index) for every index of the shape in order.
template <class F>
void each_index(const Ints& shape, const F& f) {
  Ints index(shape.size(), 0);
  for (std::int64_t i = 0, n = product(shape); i < n; ++i) {
    f(index);
    for (std::size_t d = shape.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
}
inline std::size_t offset_of(const Ints& index, const Ints& strides) {
  std::int64_t sum = 0;
  for (std::size_t d = 0; d < index.size(); ++d) sum += index[d] * strides[d];
  return static_cast<std::size_t>(sum);
}

}  // namespace cudaemu_test

// HostTensor: dtype, shape and bytes on the host. Constants, batches, initial values, results.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/types.h"

namespace ONNXDDP_API onnxddp {

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of<std::int64_t>() {
  return DType::i64;
}
template <>
constexpr DType dtype_of<std::int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of<std::uint8_t>() {
  return DType::u8;
}
template <>
constexpr DType dtype_of<bool>() {
  return DType::boolean;
}

/// A dense row-major tensor in host memory (64-byte aligned). Copies share the bytes until one of them is
/// written.
class HostTensor {
 public:
  HostTensor() : HostTensor(DType::f32, {0}) {}
  /// Zero-filled. Throws Error if the byte count overflows or a dimension is negative.
  HostTensor(DType dtype, Ints shape);
  template <class T>
  static HostTensor of(Ints shape, const std::vector<T>& values) {
    HostTensor t(dtype_of<T>(), std::move(shape));
    CHECK(static_cast<std::int64_t>(values.size()) == t.numel(), "values do not fill the shape");
    for (std::size_t i = 0; i < values.size(); ++i) t.mutable_data<T>()[i] = values[i];
    return t;
  }
  template <class T>
  static HostTensor scalar(T value) {
    return of<T>({}, {value});
  }
  /// A tensor of `dtype` filled with `value` converted.
  static HostTensor full(DType dtype, Ints shape, double value);

  DType dtype() const { return dtype_; }
  const Ints& shape() const { return shape_; }
  std::int64_t numel() const { return onnxddp::numel(shape_); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * dtype_size(dtype_); }
  TensorType type() const { return {dtype_, to_shape(shape_)}; }

  const std::byte* raw() const { return data_.get(); }
  /// Writable bytes; makes the storage this tensor's own first.
  std::byte* mutable_raw();
  template <class T>
  const T* data() const {
    CHECK(dtype_of<T>() == dtype_, "tensor is ", dtype_name(dtype_));
    return reinterpret_cast<const T*>(raw());
  }
  template <class T>
  T* mutable_data() {
    CHECK(dtype_of<T>() == dtype_, "tensor is ", dtype_name(dtype_));
    return reinterpret_cast<T*>(mutable_raw());
  }
  /// Element i as double (any dtype) or as integer (integers and bool; floats are truncated).
  double as_double(std::int64_t i) const;
  std::int64_t as_int(std::int64_t i) const;
  void set_double(std::int64_t i, double value);

  HostTensor reshaped(Ints shape) const;
  /// Elementwise conversion; float to integer truncates, anything to bool is != 0.
  HostTensor cast(DType dtype) const;
  /// Same dtype, shape and bytes.
  bool operator==(const HostTensor& other) const;
  /// 32 hex digits over dtype, shape and bytes (two 64-bit FNV-1a); names blobs in the text format.
  std::string digest() const;

 private:
  DType dtype_;
  Ints shape_;
  std::shared_ptr<std::byte[]> data_;
};

/// Hash for texts and bytes (64-bit FNV-1a).
std::uint64_t fnv1a(std::span<const std::byte> bytes, std::uint64_t seed = 0xcbf29ce484222325ULL);

}  // namespace onnxddp

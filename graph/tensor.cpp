#include "graph/tensor.h"

#include <array>
#include <cmath>
#include <new>

namespace onnxddp {
namespace {

constexpr std::size_t kAlignment = 64;

std::shared_ptr<std::byte[]> allocate(std::size_t bytes) {
  auto* memory = static_cast<std::byte*>(::operator new[](bytes + kAlignment, std::align_val_t(kAlignment)));
  return {memory, [](std::byte* p) { ::operator delete[](p, std::align_val_t(kAlignment)); }};
}

float half_to_float(std::uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const float mantissa = static_cast<float>(half & 1023);
  float out = 0;
  if (exponent == 31) {
    out = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    out = std::ldexp(mantissa, -24);
  } else {
    out = std::ldexp(mantissa + 1024, exponent - 25);
  }
  return (half & 0x8000) != 0 ? -out : out;
}

std::uint16_t float_to_half(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (magnitude < 6.103515625e-05)  // subnormal
    return static_cast<std::uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(magnitude, 24))));
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11)));
  return static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + (mantissa - 1024)));
}

float bfloat_to_float(std::uint16_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  float out = 0;
  std::memcpy(&out, &word, 4);
  return out;
}

std::uint16_t float_to_bfloat(float value) {
  std::uint32_t word = 0;
  std::memcpy(&word, &value, 4);
  if (std::isnan(value)) return static_cast<std::uint16_t>((word >> 16) | 0x40);
  word += 0x7fff + ((word >> 16) & 1);  // round to nearest even
  return static_cast<std::uint16_t>(word >> 16);
}

template <class T>
T load(const std::byte* data, std::int64_t i) {
  T out;
  std::memcpy(&out, data + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return out;
}
template <class T>
void store(std::byte* data, std::int64_t i, T value) {
  std::memcpy(data + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
}

}  // namespace

HostTensor::HostTensor(DType dtype, Ints shape) : dtype_(dtype), shape_(std::move(shape)) {
  for (std::int64_t dim : shape_)
    if (dim < 0) throw Error(cat("negative dimension in shape ", shape_str(shape_)));
  std::int64_t total = 0;
  if (__builtin_mul_overflow(onnxddp::numel(shape_), static_cast<std::int64_t>(dtype_size(dtype)), &total) ||
      total > (std::int64_t{1} << 46))
    throw Error(cat("a tensor of shape ", shape_str(shape_), " does not fit into memory"));
  data_ = allocate(static_cast<std::size_t>(total));
  std::memset(data_.get(), 0, static_cast<std::size_t>(total));
}

HostTensor HostTensor::full(DType dtype, Ints shape, double value) {
  HostTensor out(dtype, std::move(shape));
  if (value != 0)
    for (std::int64_t i = 0; i < out.numel(); ++i) out.set_double(i, value);
  return out;
}

std::byte* HostTensor::mutable_raw() {
  if (data_.use_count() > 1) {
    std::shared_ptr<std::byte[]> copy = allocate(bytes());
    std::memcpy(copy.get(), data_.get(), bytes());
    data_ = std::move(copy);
  }
  return data_.get();
}

double HostTensor::as_double(std::int64_t i) const {
  switch (dtype_) {
    case DType::f32: return static_cast<double>(load<float>(raw(), i));
    case DType::f64: return load<double>(raw(), i);
    case DType::f16: return static_cast<double>(half_to_float(load<std::uint16_t>(raw(), i)));
    case DType::bf16: return static_cast<double>(bfloat_to_float(load<std::uint16_t>(raw(), i)));
    case DType::u64: return static_cast<double>(load<std::uint64_t>(raw(), i));
    default: return static_cast<double>(as_int(i));
  }
}

std::int64_t HostTensor::as_int(std::int64_t i) const {
  switch (dtype_) {
    case DType::i8: return load<std::int8_t>(raw(), i);
    case DType::i16: return load<std::int16_t>(raw(), i);
    case DType::i32: return load<std::int32_t>(raw(), i);
    case DType::i64: return load<std::int64_t>(raw(), i);
    case DType::u8: return load<std::uint8_t>(raw(), i);
    case DType::u16: return load<std::uint16_t>(raw(), i);
    case DType::u32: return load<std::uint32_t>(raw(), i);
    case DType::u64: return static_cast<std::int64_t>(load<std::uint64_t>(raw(), i));
    case DType::boolean: return load<std::uint8_t>(raw(), i) != 0 ? 1 : 0;
    default: break;
  }
  // Floats truncate; what an integer cannot hold saturates (NaN: 0), where a plain cast would be undefined.
  const double value = as_double(i);
  if (std::isnan(value)) return 0;
  if (value >= 9.2233720368547758e18) return INT64_MAX;
  if (value <= -9.2233720368547758e18) return INT64_MIN;
  return static_cast<std::int64_t>(value);
}

namespace {
void set_int(std::byte* data, DType dtype, std::int64_t i, std::int64_t value) {
  switch (dtype) {
    case DType::i8: return store(data, i, static_cast<std::int8_t>(value));
    case DType::i16: return store(data, i, static_cast<std::int16_t>(value));
    case DType::i32: return store(data, i, static_cast<std::int32_t>(value));
    case DType::i64: return store(data, i, value);
    case DType::u8: return store(data, i, static_cast<std::uint8_t>(value));
    case DType::u16: return store(data, i, static_cast<std::uint16_t>(value));
    case DType::u32: return store(data, i, static_cast<std::uint32_t>(value));
    case DType::u64: return store(data, i, static_cast<std::uint64_t>(value));
    default: CHECK(false, "not an integer type");
  }
}
}  // namespace

void HostTensor::set_double(std::int64_t i, double value) {
  std::byte* data = mutable_raw();
  switch (dtype_) {
    case DType::f32: return store(data, i, static_cast<float>(value));
    case DType::f64: return store(data, i, value);
    case DType::f16: return store(data, i, float_to_half(value));
    case DType::bf16: return store(data, i, float_to_bfloat(static_cast<float>(value)));
    case DType::boolean: return store(data, i, static_cast<std::uint8_t>(value != 0));
    default: {
      const bool fits = std::fabs(value) < 9.2233720368547758e18;
      return set_int(data, dtype_, i,
                     fits                ? static_cast<std::int64_t>(value)
                     : std::isnan(value) ? 0
                     : value > 0         ? INT64_MAX
                                         : INT64_MIN);
    }
  }
}

HostTensor HostTensor::reshaped(Ints shape) const {
  CHECK(onnxddp::numel(shape) == numel(), "reshape ", shape_str(shape_), " to ", shape_str(shape));
  HostTensor out = *this;
  out.shape_ = std::move(shape);
  return out;
}

HostTensor HostTensor::cast(DType dtype) const {
  if (dtype == dtype_) return *this;
  HostTensor out(dtype, shape_);
  std::byte* data = out.mutable_raw();
  for (std::int64_t i = 0; i < numel(); ++i) {
    if (!is_float(dtype_) && is_integer(dtype)) {
      set_int(data, dtype, i, as_int(i));
    } else {
      out.set_double(i, as_double(i));
    }
  }
  return out;
}

bool HostTensor::operator==(const HostTensor& other) const {
  return dtype_ == other.dtype_ && shape_ == other.shape_ && std::memcmp(raw(), other.raw(), bytes()) == 0;
}

std::uint64_t fnv1a(std::span<const std::byte> bytes, std::uint64_t seed) {
  std::uint64_t hash = seed;
  for (std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3ULL;
  return hash;
}

std::string HostTensor::digest() const {
  const std::string type_text = type().str();
  std::string out;
  for (std::uint64_t seed : {0xcbf29ce484222325ULL, 0x9ae16a3b2f90404fULL}) {
    std::uint64_t hash = fnv1a(std::as_bytes(std::span(type_text.data(), type_text.size())), seed);
    hash = fnv1a({raw(), bytes()}, hash);
    std::array<char, 17> hex{};
    std::snprintf(hex.data(), hex.size(), "%016llx", static_cast<unsigned long long>(hash));
    out += hex.data();
  }
  return out;
}

}  // namespace onnxddp

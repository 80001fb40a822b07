#include "distributed/reduce.h"

#include <cstdint>

namespace onnxddp {
namespace {

template <class T>
void sum(const std::vector<const void*>& parts, std::size_t count, void* out) {
  auto* to = static_cast<T*>(out);
  if (parts.size() == 2) {  // the common case in one pass
    const auto* a = static_cast<const T*>(parts[0]);
    const auto* b = static_cast<const T*>(parts[1]);
    for (std::size_t i = 0; i < count; ++i) to[i] = a[i] + b[i];
    return;
  }
  constexpr std::size_t kBlock =
      1024;  // `out` may be a part: a block is written after all its parts are read
  T block[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = count - begin < kBlock ? count - begin : kBlock;
    const auto* first = static_cast<const T*>(parts[0]) + begin;
    for (std::size_t i = 0; i < n; ++i) block[i] = first[i];
    for (std::size_t p = 1; p < parts.size(); ++p) {
      const auto* next = static_cast<const T*>(parts[p]) + begin;
      for (std::size_t i = 0; i < n; ++i) block[i] += next[i];
    }
    for (std::size_t i = 0; i < n; ++i) to[begin + i] = block[i];
  }
}

}  // namespace

std::size_t reducible_size(DType dtype) {
  CHECK(dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i64,
        "collectives sum f32, f64 and i64 only, not type ", static_cast<int>(dtype));
  return dtype == DType::f32 ? 4 : 8;
}

void ordered_sum(const std::vector<const void*>& parts, std::size_t count, DType dtype, void* out) {
  switch (dtype) {
    case DType::f32: return sum<float>(parts, count, out);
    case DType::f64: return sum<double>(parts, count, out);
    default: return sum<std::uint64_t>(parts, count, out);  // i64: unsigned, so that overflow wraps
  }
}

}  // namespace onnxddp

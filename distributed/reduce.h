// Sums of the ranks' values in rank order: the arithmetic that every back end shares, so that all give the
// same bits.
#pragma once

#include <cstddef>
#include <vector>

#include "graph/types.h"

namespace onnxddp {

/// Bytes of an element that collectives can sum; throws InternalError for any other type.
std::size_t reducible_size(DType dtype);

/// out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i]) + …; `out` may be one of the parts.
void ordered_sum(const std::vector<const void*>& parts, std::size_t count, DType dtype, void* out);

/// The part [begin, end) of `count` elements that rank `rank` of `size` sums.
struct Span {
  std::size_t begin, end;
  std::size_t count() const { return end - begin; }
};
inline Span share_of(std::size_t count, int rank, int size) {
  const auto r = static_cast<std::size_t>(rank), n = static_cast<std::size_t>(size);
  const std::size_t each = (count / n + 15) / 16 * 16;  // whole cache lines
  const auto at = [&](std::size_t k) { return k == n || k * each > count ? count : k * each; };
  return {at(r), at(r + 1)};
}

}  // namespace onnxddp

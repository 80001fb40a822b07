// What a node's bound shapes and attributes mean in memory: for the kernels of every device. Compiled by nvcc
// too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "graph/types.h"

namespace ONNXDDP_API onnxddp {

struct SlotType;
class PlanContext;

/// Slots, and the operands of a bucket, start at multiples of this: whole cache lines.
inline constexpr std::size_t kSlotAlignment = 64;
constexpr std::size_t padded(std::size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

/// Strides with which an operand is read where it is broadcast to `shape`: 0 on axes that it lacks or that
/// are 1.
inline Ints broadcast_strides(const Ints& own_shape, const Ints& own_strides, const Ints& shape) {
  Ints strides(shape.size(), 0);
  const std::size_t lead = shape.size() - own_shape.size();
  for (std::size_t d = 0; d < own_shape.size(); ++d)
    if (own_shape[d] != 1) strides[lead + d] = own_strides[d];
  return strides;
}
Ints broadcast_strides(const SlotType& operand, const Ints& shape);

/// A dense tensor as [outer, size, inner] around an axis (from the end where negative).
struct Split {
  std::int64_t outer = 1, size = 1, inner = 1;
};
Split split_at(const Ints& shape, std::int64_t axis);

/// [N, C, ...] in memory. pixels: rows of c channels (NHWC, rank 2); else planes of `size` elements, batch *
/// c of them.
struct Channels {
  bool pixels = false;
  std::int64_t c = 0, batch = 0, size = 1;             // pixels: batch counts rows, size is 1
  std::int64_t count() const { return batch * size; }  // elements of a channel
};
Channels channels_of(const SlotType& x);

/// A part of a tensor: strides, and the element where it begins.
struct Part {
  Ints strides;
  std::int64_t offset = 0;
};
/// Of input 0 of a Slice: what the output is read from.
Part sliced_part(const PlanContext& slice);
/// Of the output of a SumPieces: what piece k is added to.
Part piece_part(const PlanContext& pieces, std::size_t k);
/// Of input 0 of a Transpose, by axis of the output.
Ints transposed_strides(const PlanContext& transpose);

/// Bytes of each operand of an AllReduce, which sums one element type.
std::vector<std::size_t> all_reduce_bytes(const PlanContext& reduce);
/// Bytes from the first operand to the end of the last where they lie as the plan lays a bucket out, side by
/// side and each padded with zeros: one call reduces them. Nothing: they lie apart.
std::optional<std::size_t> bucket_bytes(void* const* operands, const std::vector<std::size_t>& bytes);

}  // namespace onnxddp

#include "executor/operands.h"

#include "executor/kernel.h"

namespace onnxddp {

Ints broadcast_strides(const SlotType& operand, const Ints& shape) {
  return broadcast_strides(operand.shape, operand.strides(), shape);
}

Split split_at(const Ints& shape, std::int64_t axis) {
  const auto at = static_cast<std::size_t>(normal_axis(axis, shape.size()));
  Split split;
  split.size = shape[at];
  for (std::size_t d = 0; d < at; ++d) split.outer *= shape[d];
  for (std::size_t d = at + 1; d < shape.size(); ++d) split.inner *= shape[d];
  return split;
}

Channels channels_of(const SlotType& x) {
  CHECK(x.shape.size() >= 2, "batch norm needs a channel axis");
  std::int64_t size = 1;
  for (std::size_t d = 2; d < x.shape.size(); ++d) size *= x.shape[d];
  const std::int64_t batch = x.shape[0], c = x.shape[1];
  if (size == 1 || x.layout == Layout::nhwc) return {true, c, batch * size, 1};
  return {false, c, batch, size};
}

Part sliced_part(const PlanContext& c) {
  const SlotType& x = c.inputs[0];
  const Ints axes = c.integers("axes"), starts = c.integers("starts"), steps = c.integers("steps");
  Part part{x.strides()};
  for (std::size_t k = 0; k < axes.size(); ++k) {
    const auto d = static_cast<std::size_t>(normal_axis(axes[k], x.shape.size()));
    part.offset += starts[k] * part.strides[d];
    part.strides[d] *= steps.empty() ? 1 : steps[k];
  }
  return part;
}

Part piece_part(const PlanContext& c, std::size_t k) {
  const Ints starts = c.integers("starts"), steps = c.integers("steps");
  Part part{c.outputs[0].strides()};
  const std::size_t rank = part.strides.size();
  for (std::size_t d = 0; d < rank; ++d) {
    part.offset += starts[k * rank + d] * part.strides[d];
    part.strides[d] *= steps[k * rank + d];
  }
  return part;
}

Ints transposed_strides(const PlanContext& c) {
  const Ints strides = c.inputs[0].strides();
  Ints from;
  for (const std::int64_t axis : c.integers("perm")) from.push_back(strides[static_cast<std::size_t>(axis)]);
  return from;
}

std::vector<std::size_t> all_reduce_bytes(const PlanContext& c) {
  if (c.text("op") != "sum") throw Error(cat("AllReduce: unknown op '", c.text("op"), "'"));
  std::vector<std::size_t> bytes;
  for (const SlotType& t : c.inputs) {
    CHECK(t.dtype == c.inputs[0].dtype, "operands of one all-reduce have one type");
    bytes.push_back(t.bytes());
  }
  return bytes;
}

std::optional<std::size_t> bucket_bytes(void* const* operands, const std::vector<std::size_t>& bytes) {
  if (bytes.empty()) return std::nullopt;
  for (std::size_t k = 1; k < bytes.size(); ++k)
    if (static_cast<char*>(operands[k - 1]) + padded(bytes[k - 1]) != operands[k]) return std::nullopt;
  const char* end = static_cast<char*>(operands[bytes.size() - 1]) + bytes.back();
  return static_cast<std::size_t>(end - static_cast<char*>(operands[0]));
}

}  // namespace onnxddp

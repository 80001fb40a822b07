// Kernels that move elements: copies, Transpose, Expand, Concat, Slice, SumPieces, Reorder; and by index:
// Gather, its gradient, dropout.
#include "executor/cuda/table_parts.h"

namespace onnxddp::cuda {
namespace {

/// One strided copy from input 0 to output 0.
Run one_copy(const CopyPlan& plan) {
  return [plan](const RunContext& r) { copy(plan, r.inputs[0], r.outputs[0], stream()); };
}

/// The same elements in the same memory order: Identity, Copy, Reshape of a dense tensor.
Run same_bytes(PlanContext& c) {
  CHECK(c.inputs[0].layout == c.outputs[0].layout, "a plain copy from one layout to another");
  return
      [bytes = c.outputs[0].bytes()](const RunContext& r) { copy_bytes(r.outputs[0], r.inputs[0], bytes); };
}

Run transpose(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  return one_copy(plan_copy(y.shape, y.strides(), transposed_strides(c), dtype_size(y.dtype)));
}

Run expand(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  return one_copy(
      plan_copy(y.shape, y.strides(), broadcast_strides(c.inputs[0], y.shape), dtype_size(y.dtype)));
}

/// From one memory order to another; only in plans.
Run reorder(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  return one_copy(plan_copy(y.shape, y.strides(), c.inputs[0].strides(), dtype_size(y.dtype)));
}

Run concat(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  const auto axis = static_cast<std::size_t>(normal_axis(c.integer("axis"), y.shape.size()));
  std::vector<CopyPlan> plans;
  std::int64_t at = 0;
  for (const SlotType& x : c.inputs) {
    plans.push_back(
        plan_copy(x.shape, y.strides(), x.strides(), dtype_size(y.dtype), at * y.strides()[axis]));
    at += x.shape[axis];
  }
  return [plans = std::move(plans)](const RunContext& r) {
    for (std::size_t k = 0; k < plans.size(); ++k) copy(plans[k], r.inputs[k], r.outputs[0], stream());
  };
}

Run slice(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  const Part from = sliced_part(c);
  return one_copy(plan_copy(y.shape, y.strides(), from.strides, dtype_size(y.dtype), 0, from.offset));
}

/// Zeros, then every piece added at its place.
Run sum_pieces(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  std::vector<CopyPlan> plans;
  for (std::size_t k = 0; k < c.inputs.size(); ++k) {
    const Part to = piece_part(c, k);
    plans.push_back(
        plan_copy(c.inputs[k].shape, to.strides, c.inputs[k].strides(), dtype_size(y.dtype), to.offset));
  }
  return [plans = std::move(plans), n = y.numel(), dtype = y.dtype](const RunContext& r) {
    fill(r.outputs[0], n, 0, dtype_size(dtype), stream());
    for (std::size_t k = 0; k < plans.size(); ++k)
      add_to(plans[k], dtype, r.inputs[k], r.outputs[0], stream());
  };
}

}  // namespace

void add_layouts(KernelTable& table) {
  add(table, "Identity", kAnyType, same_bytes);
  add(table, "Copy", kAnyType, same_bytes);
  add(table, "Reshape", kAnyType, same_bytes);
  add(table, "Transpose", kAnyType, transpose);
  add(table, "Expand", kAnyType, expand);
  add(table, "Concat", kAnyType, concat);
  add(table, "Slice", kAnyType, slice);
  add(table, "SumPieces", kNumbers, sum_pieces);
  add(table, "Reorder", kAnyType, reorder);
}

namespace {

/// `shape`: of the indexed tensor.
Table table_of(const PlanContext& c, const Ints& shape) {
  const Split s = split_at(shape, c.integer("axis"));
  return {s.outer, s.size, s.inner, c.inputs[1].numel()};
}

Run rows_by_index(PlanContext& c) {
  const std::size_t width = dtype_size(c.inputs[0].dtype);
  const bool wide = c.inputs[1].dtype == DType::i64;
  return [=, table = table_of(c, c.inputs[0].shape)](const RunContext& r) {
    gather(table, width, r.inputs[0], r.inputs[1], wide, r.outputs[0], current_lane().fault, stream());
  };
}

Run rows_by_index_grad(PlanContext& c) {
  const Table table = table_of(c, c.outputs[0].shape);
  c.scratch_bytes = gather_grad_scratch_bytes(table);
  const bool wide = c.inputs[1].dtype == DType::i64;
  return [=, dtype = c.inputs[0].dtype](const RunContext& r) {
    gather_grad(table, dtype, r.inputs[0], r.inputs[1], wide, r.outputs[0], r.scratch, current_lane().fault,
                stream());
  };
}

Run drop(PlanContext& c) {
  const SlotType& x = c.inputs[0];
  const std::int64_t n = x.numel(), key = c.integer("key");
  const bool rows = c.flag("batch") && !x.shape.empty(), masked = c.has_output(1);
  const std::int64_t inner = !rows ? 0 : n == 0 ? 1 : n / x.shape[0];
  return [=, ratio = c.number("ratio"), dtype = x.dtype](const RunContext& r) {
    dropout(dtype, r.inputs[0], r.in<std::int64_t>(1), key, ratio, inner, r.outputs[0],
            masked ? r.out<bool>(1) : nullptr, n, stream());
  };
}

}  // namespace

void add_indexing(KernelTable& table) {
  add(table, "Gather", kAnyType, rows_by_index);
  add(table, "GatherGrad", kFloats, rows_by_index_grad);
  add(table, "Dropout", kFloats, drop);
}

}  // namespace onnxddp::cuda

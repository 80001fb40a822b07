// Elementwise functions, Where, Cast, and reductions.
#include <algorithm>

#include "executor/cuda/table_parts.h"
#include "executor/scalar_ops.h"

namespace onnxddp::cuda {
namespace {

/// The op's name chooses the kernel. `limits`: Clip and ClipMask have them.
Run unary(PlanContext& c, bool limits) {
  const DType dtype = c.inputs[0].dtype;
  const UnaryKernel kernel = unary_kernel(c.node.op->name, dtype);
  CHECK(kernel != nullptr, "no unary kernel ", c.node.op->name, " of ", dtype_name(dtype));
  const double min = limits ? c.number("min") : 0, max = limits ? c.number("max") : 0;
  return [=, n = c.inputs[0].numel()](const RunContext& r) {
    kernel(r.inputs[0], r.outputs[0], n, min, max, stream());
  };
}

Run binary(PlanContext& c) {
  const DType dtype = c.inputs[0].dtype;
  const BinaryKernel kernel = binary_kernel(c.node.op->name, dtype);
  CHECK(kernel != nullptr, "no binary kernel ", c.node.op->name, " of ", dtype_name(dtype));
  return [=, walk = walk_over<2>(c.outputs[0], {&c.inputs[0], &c.inputs[1]})](const RunContext& r) {
    kernel(walk, r.inputs[0], r.inputs[1], r.outputs[0], stream());
  };
}

Run select(PlanContext& c) {
  const std::size_t width = dtype_size(c.outputs[0].dtype);
  return [=, walk = walk_over<3>(c.outputs[0], {&c.inputs[0], &c.inputs[1], &c.inputs[2]})](
             const RunContext& r) {
    where(walk, r.in<bool>(0), r.inputs[1], r.inputs[2], r.outputs[0], width, stream());
  };
}

const std::vector<DType> kCastable = {DType::f32, DType::bf16, DType::f64, DType::i64,    DType::i32,
                                      DType::i16, DType::i8,   DType::u8,  DType::boolean};

Run convert(PlanContext& c) {
  const DType from = c.inputs[0].dtype, to = c.outputs[0].dtype;
  for (const DType dtype : {from, to})
    if (std::count(kCastable.begin(), kCastable.end(), dtype) == 0)
      throw Error(cat("Cast: CUDA has no kernel for ", dtype_name(dtype)));
  return [=, n = c.inputs[0].numel()](const RunContext& r) {
    cast(r.inputs[0], from, r.outputs[0], to, n, stream());
  };
}

}  // namespace

void add_elementwise(KernelTable& table) {
  const auto plain = [](PlanContext& c) { return unary(c, false); };
  const auto limited = [](PlanContext& c) { return unary(c, true); };
  std::vector<DType> comparable = kNumbers;
  comparable.push_back(DType::boolean);
#define ONNXDDP_ADD(NAME) add(table, #NAME, kFloats, plain);
  ONNXDDP_UNARY_FLOAT_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add(table, #NAME, kNumbers, plain);
  ONNXDDP_UNARY_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add(table, #NAME, kFloats, binary);
  ONNXDDP_BINARY_FLOAT_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add(table, #NAME, kNumbers, binary);
  ONNXDDP_BINARY_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add(table, #NAME, comparable, binary);
  ONNXDDP_COMPARE_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add(table, #NAME, {DType::boolean}, binary);
  ONNXDDP_LOGIC_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
  add(table, "Not", {DType::boolean}, plain);
  add(table, "Clip", kFloats, limited);
  add(table, "ClipMask", kFloats, limited);
  add(table, "Where", kAnyType, select);
  add(table, "Cast", kAnyType, convert);
}

namespace {

Run reduction(PlanContext& c, Reduction kind, const ReducePlan& plan) {
  c.scratch_bytes = reduce_scratch_bytes(plan);
  return [=, dtype = c.inputs[0].dtype](const RunContext& r) {
    reduce(kind, plan, dtype, r.inputs[0], r.outputs[0], r.scratch, stream());
  };
}

/// Reduces over `axes`; the output has them as 1 or not at all.
Run reduce_axes(PlanContext& c, Reduction kind) {
  const SlotType &x = c.inputs[0], &y = c.outputs[0];
  std::vector<bool> gone(x.shape.size(), false);
  for (const std::int64_t axis : c.integers("axes"))
    gone[static_cast<std::size_t>(normal_axis(axis, x.shape.size()))] = true;
  const Ints own = y.strides();
  Ints y_strides(x.shape.size(), 0);
  std::size_t at = 0;
  for (std::size_t d = 0; d < gone.size(); ++d) {
    if (!gone[d]) y_strides[d] = own[at];
    if (!gone[d] || c.flag("keepdims")) ++at;
  }
  return reduction(c, kind, plan_reduce(x.shape, x.strides(), gone, y_strides));
}

Run sum_to(PlanContext& c) {
  const SlotType &x = c.inputs[0], &y = c.outputs[0];
  return reduction(c, Reduction::sum, plan_sum_to(x.shape, x.strides(), y.shape, y.strides()));
}

Run index_of_max(PlanContext& c) {
  const Split s = split_at(c.inputs[0].shape, c.integer("axis"));
  return [=, dtype = c.inputs[0].dtype](const RunContext& r) {
    arg_max(dtype, r.inputs[0], r.out<std::int64_t>(0), s.outer, s.size, s.inner, stream());
  };
}

Run count_labels(PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel(), ignore = c.integer("ignore_index");
  const bool wide = c.inputs[0].dtype == DType::i64;
  return [=, to = c.outputs[0].dtype](const RunContext& r) {
    count_targets(r.inputs[0], wide, n, ignore, to, r.outputs[0], stream());
  };
}

}  // namespace

void add_reductions(KernelTable& table) {
  const auto axes = [](Reduction kind) { return [kind](PlanContext& c) { return reduce_axes(c, kind); }; };
  add(table, "ReduceSum", kNumbers, axes(Reduction::sum));
  add(table, "ReduceMean", kFloats, axes(Reduction::mean));
  add(table, "ReduceMax", kNumbers, axes(Reduction::max));
  add(table, "SumTo", kNumbers, sum_to);
  add(table, "ArgMax", kNumbers, index_of_max);
  add(table, "CountTargets", {DType::i64, DType::i32}, count_labels);
}

}  // namespace onnxddp::cuda

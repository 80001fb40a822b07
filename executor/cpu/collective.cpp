// Collectives: the plan's steps call the communicator. Without one (constants, single nodes) there is one
// rank.
#include "distributed/communicator.h"
#include "executor/cpu/kernels.h"

namespace onnxddp::cpu {
namespace {

/// The sum over ranks, in place.
Run prepare_all_reduce(PlanContext& c) {
  return [bytes = all_reduce_bytes(c), dtype = c.inputs[0].dtype](const RunContext& r) {
    for (std::size_t k = 0; k < bytes.size(); ++k)
      if (r.outputs[k] != r.inputs[k]) std::memcpy(r.outputs[k], r.inputs[k], bytes[k]);
    if (!r.communicator) return;
    if (const auto whole = bucket_bytes(r.outputs, bytes))
      return r.communicator->all_reduce(r.outputs[0], *whole / dtype_size(dtype), dtype);
    for (std::size_t k = 0; k < bytes.size(); ++k)
      r.communicator->all_reduce(r.outputs[k], bytes[k] / dtype_size(dtype), dtype);
  };
}

Run prepare_all_gather(PlanContext& c) {
  const std::size_t bytes = c.inputs[0].bytes();
  const std::int64_t ranks = c.integer("ranks");
  return [=](const RunContext& r) {
    const std::int64_t world = r.communicator ? r.communicator->size() : 1;
    CHECK(world == ranks, "AllGather was planned for ", ranks, " ranks and runs on ", world);
    if (r.communicator) {
      r.communicator->all_gather(r.inputs[0], bytes, r.outputs[0]);
    } else {
      std::memcpy(r.outputs[0], r.inputs[0], bytes);
    }
  };
}

}  // namespace

void add_collectives(KernelTable& table) {
  add(table, {"AllReduce", {DType::f32, DType::f64, DType::i64}, LayoutRule::dense, prepare_all_reduce});
  add(table, {"AllGather", {}, LayoutRule::dense, prepare_all_gather});
}

}  // namespace onnxddp::cpu

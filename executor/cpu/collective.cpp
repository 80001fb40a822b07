// Collectives: the plan's steps call the communicator. Without one (constants, single nodes) there is one
// rank.
#include "distributed/communicator.h"
#include "executor/cpu/kernels.h"

namespace onnxddp::cpu {
namespace {

/// Distance from the start of one operand to that of the next where the plan lays a bucket out: whole cache
/// lines.
std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

/// The sum over ranks, in place. Operands that lie side by side, padded with zeros, are reduced by one call.
Run prepare_all_reduce(PlanContext& c) {
  if (c.text("op") != "sum") throw Error(cat("AllReduce: unknown op '", c.text("op"), "'"));
  std::vector<std::size_t> bytes;
  for (const SlotType& t : c.inputs) {
    CHECK(t.dtype == c.inputs[0].dtype, "operands of one all-reduce have one type");
    bytes.push_back(t.bytes());
  }
  return [bytes = std::move(bytes), dtype = c.inputs[0].dtype](const RunContext& r) {
    bool adjacent = true;
    for (std::size_t k = 0; k < bytes.size(); ++k) {
      if (r.outputs[k] != r.inputs[k]) std::memcpy(r.outputs[k], r.inputs[k], bytes[k]);
      adjacent =
          adjacent && (k == 0 || static_cast<char*>(r.outputs[k - 1]) + padded(bytes[k - 1]) == r.outputs[k]);
    }
    if (!r.communicator) return;
    if (adjacent && !bytes.empty()) {
      const char* first = static_cast<char*>(r.outputs[0]);
      const char* last = static_cast<char*>(r.outputs[bytes.size() - 1]) + bytes.back();
      r.communicator->all_reduce(r.outputs[0], static_cast<std::size_t>(last - first) / dtype_size(dtype),
                                 dtype);
      return;
    }
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

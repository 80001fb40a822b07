// Parameter updates, the norm of the gradients, collectives.
#include "executor/cuda/nccl.h"
#include "executor/cuda/table_parts.h"

namespace onnxddp::cuda {
namespace {

/// A list of one tensor of n elements, which goes with the launch; its pointers come at run.
template <class Entry>
DeviceList<Entry> list_of_one(std::int64_t n) {
  DeviceList<Entry> list;
  list.tensors.push_back({});
  list.tensors[0].n = n;
  list.chunks = chunks_of(list.tensors);
  return list;
}

UpdateEntry& bind(UpdateList& list, const RunContext& r) {
  UpdateEntry& e = list.tensors[0];
  e.p = r.inputs[0];
  e.g = r.inputs[1];
  e.hyper = r.in<double>(2);
  e.p_next = r.outputs[0];
  return e;
}

Run update_by_sgd(PlanContext& c) {
  const bool nesterov = c.flag("nesterov"), momentum = c.has(3);
  return [=, list = list_of_one<UpdateEntry>(c.inputs[0].numel())](const RunContext& r) mutable {
    UpdateEntry& e = bind(list, r);
    if (momentum) {
      e.m = r.in<float>(3);
      e.m_next = r.out<float>(1);
    }
    sgd(list, DType::f32, DType::f32, nesterov, nullptr, stream());
  };
}

Run update_by_adam(PlanContext& c) {
  const bool decoupled = c.flag("decoupled"), amsgrad = c.has(5);
  return [=, list = list_of_one<UpdateEntry>(c.inputs[0].numel())](const RunContext& r) mutable {
    UpdateEntry& e = bind(list, r);
    e.m = r.in<float>(3);
    e.v = r.in<float>(4);
    e.m_next = r.out<float>(1);
    e.v_next = r.out<float>(2);
    if (amsgrad) {
      e.vmax = r.in<float>(5);
      e.vmax_next = r.out<float>(3);
    }
    adam(list, DType::f32, DType::f32, decoupled, nullptr, stream());
  };
}

/// One launch a tensor, then one that adds what they found.
Run squares_of_all(PlanContext& c) {
  std::vector<TensorList> lists;
  std::int64_t parts = 0;
  for (const SlotType& x : c.inputs) {
    lists.push_back(list_of_one<ListEntry>(x.numel()));
    parts += static_cast<std::int64_t>(lists.back().chunks.size());
  }
  c.scratch_bytes = static_cast<std::size_t>(parts) * sizeof(double);
  const DType dtype = c.inputs[0].dtype, to = c.outputs[0].dtype;
  return [=, lists = std::move(lists)](const RunContext& r) mutable {
    double* next = static_cast<double*>(r.scratch);
    for (std::size_t k = 0; k < lists.size(); ++k) {
      lists[k].tensors[0].x = r.inputs[k];
      sum_squares_parts(lists[k], dtype, next, stream());
      next += lists[k].chunks.size();
    }
    sum_parts(static_cast<const double*>(r.scratch), parts, to, r.outputs[0], stream());
  };
}

}  // namespace

/// f32 only: the state of an op has its dtype, that of the kernels is always float.
void add_updates(KernelTable& table) {
  add(table, "SgdUpdate", kFloat, update_by_sgd);
  add(table, "AdamUpdate", kFloat, update_by_adam);
  add(table, "SumSquares", kFloats, squares_of_all);
}

namespace {

/// The module's communicator; null for one rank without one.
NcclCommunicator* communicator_of(const RunContext& r) {
  if (r.communicator == nullptr) return nullptr;
  auto* own = dynamic_cast<NcclCommunicator*>(r.communicator);
  CHECK(own != nullptr, "a collective on device memory needs the module's communicator");
  return own;
}

/// The sum over ranks, in place.
Run sum_over_ranks(PlanContext& c) {
  return [bytes = all_reduce_bytes(c), dtype = c.inputs[0].dtype](const RunContext& r) {
    for (std::size_t k = 0; k < bytes.size(); ++k) copy_bytes(r.outputs[k], r.inputs[k], bytes[k]);
    NcclCommunicator* communicator = communicator_of(r);
    if (communicator == nullptr) return;
    const std::size_t width = dtype_size(dtype);
    if (const auto whole = bucket_bytes(r.outputs, bytes))
      return communicator->queue_all_reduce(r.outputs[0], *whole / width, dtype, stream());
    for (std::size_t k = 0; k < bytes.size(); ++k)
      communicator->queue_all_reduce(r.outputs[k], bytes[k] / width, dtype, stream());
  };
}

Run rows_of_ranks(PlanContext& c) {
  const std::size_t bytes = c.inputs[0].bytes();
  return [=, ranks = c.integer("ranks")](const RunContext& r) {
    NcclCommunicator* communicator = communicator_of(r);
    const std::int64_t world = communicator != nullptr ? communicator->size() : 1;
    CHECK(world == ranks, "AllGather was planned for ", ranks, " ranks and runs on ", world);
    if (communicator == nullptr) return copy_bytes(r.outputs[0], r.inputs[0], bytes);
    communicator->queue_all_gather(r.inputs[0], bytes, r.outputs[0], stream());
  };
}

}  // namespace

/// Queued only: whoever waits for the lane does it by NcclCommunicator::wait, which has the deadline.
void add_collectives(KernelTable& table) {
  add(table, "AllReduce", {DType::f32, DType::bf16, DType::f64, DType::i64}, sum_over_ranks);
  add(table, "AllGather", kAnyType, rows_of_ranks);
}

}  // namespace onnxddp::cuda

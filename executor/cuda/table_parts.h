// The families of the table's kernels, and what they share. A kernel's `prepare` turns shapes into the plans
// of kernels.h once; its `run` queues launches on the lane's stream and does nothing else.
#pragma once

#include <array>

#include "executor/cuda/kernels.h"
#include "executor/cuda/runtime.h"
#include "executor/kernel.h"

namespace onnxddp::cuda {

inline const std::vector<DType> kFloats = {DType::f32, DType::bf16};
inline const std::vector<DType> kNumbers = {DType::f32, DType::bf16, DType::i64, DType::i32};
inline const std::vector<DType> kFloat = {DType::f32};
inline const std::vector<DType> kAnyType = {};

/// Adds a kernel that takes layouts as the CPU's kernel of the op does, so that a plan has the same reorders
/// on both.
void add(KernelTable& table, const std::string& op, const std::vector<DType>& dtypes,
         std::function<Run(PlanContext&)> prepare);

void add_elementwise(KernelTable& table);
void add_reductions(KernelTable& table);
void add_losses(KernelTable& table);
void add_norms(KernelTable& table);
void add_pools(KernelTable& table);
void add_layouts(KernelTable& table);
void add_indexing(KernelTable& table);
void add_updates(KernelTable& table);
void add_collectives(KernelTable& table);
void add_products(KernelTable& table);  // MatMul, Gemm
void add_convolutions(KernelTable& table);

/// Where run queues its work.
inline cudaStream_t stream() { return current_lane().stream; }

/// A walk over the elements of `y`, the operands broadcast to it. Operand 0 is y.
template <std::size_t N>
Walk<static_cast<int>(N + 1)> walk_over(const SlotType& y, const std::array<const SlotType*, N>& operands) {
  std::vector<Ints> strides = {y.strides()};
  for (const SlotType* operand : operands) strides.push_back(broadcast_strides(*operand, y.shape));
  return make_walk<static_cast<int>(N + 1)>(y.shape, strides);
}

/// Copies bytes of the device; nothing where the planner has put both at one place.
void copy_bytes(void* to, const void* from, std::size_t bytes);

/// Bytes of a part of scratch memory, so that the next part is aligned.
inline std::size_t scratch_part(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace onnxddp::cuda

#include "executor/cuda/kernel_table.h"

#include "executor/cuda/blas.h"
#include "executor/cuda/runtime.h"

namespace onnxddp::cuda {
namespace {

/// One product, or several where batches are broadcast: first elements of the operands of each.
struct Piece {
  Product product;
  std::int64_t a = 0, b = 0, c = 0;
};

/// The operand as [batch axes…, rows, columns]; a vector becomes a matrix of one row (a) or one column (b).
Ints matrix_shape(const Ints& shape, bool left) {
  if (shape.size() > 1) return shape;
  return left ? Ints{1, shape[0]} : Ints{shape[0], 1};
}

/// Matrices between neighbours along each batch axis of the result; 0 where the operand is broadcast.
Ints batch_steps(const Ints& shape, const Ints& batch) {
  Ints steps(batch.size(), 0);
  std::int64_t step = 1;
  const std::size_t own = shape.size() - 2;
  for (std::size_t i = 0; i < own; ++i) {
    const std::size_t from = own - 1 - i, to = batch.size() - 1 - i;
    if (shape[from] != 1) steps[to] = step;
    step *= shape[from];
  }
  return steps;
}

std::vector<Piece> matmul_pieces(const Ints& a_shape, const Ints& b_shape, DType dtype) {
  const Ints a = matrix_shape(a_shape, true), b = matrix_shape(b_shape, false);
  Ints batch(std::max(a.size(), b.size()) - 2, 1);
  for (const Ints* shape : {&a, &b})
    for (std::size_t i = 0; i + 2 < shape->size(); ++i) {
      std::int64_t& size = batch[batch.size() - 1 - i];
      const std::int64_t own = (*shape)[shape->size() - 3 - i];
      if (own != 1) size = own;
    }
  const Ints a_steps = batch_steps(a, batch), b_steps = batch_steps(b, batch);
  Product p;
  p.m = a[a.size() - 2];
  p.k = a.back();
  p.n = b.back();
  p.dtype = p.result = dtype;
  p.stride_c = p.m * p.n;
  if (!batch.empty()) {  // the last batch axis is one strided product
    p.batch = batch.back();
    p.stride_a = a_steps.back() * p.m * p.k;
    p.stride_b = b_steps.back() * p.k * p.n;
  }
  const std::int64_t total = numel(batch) / std::max<std::int64_t>(p.batch, 1);
  std::vector<Piece> pieces;
  for (std::int64_t i = 0; i < total; ++i) {
    Piece piece{p, 0, 0, i * p.batch * p.stride_c};
    std::int64_t rest = i;
    for (std::size_t axis = batch.empty() ? 0 : batch.size() - 1; axis-- > 0;) {
      piece.a += rest % batch[axis] * a_steps[axis] * p.m * p.k;
      piece.b += rest % batch[axis] * b_steps[axis] * p.k * p.n;
      rest /= batch[axis];
    }
    pieces.push_back(piece);
  }
  return pieces;
}

const char* element(const void* base, std::int64_t index, DType dtype) {
  return static_cast<const char*>(base) + index * static_cast<std::int64_t>(dtype_size(dtype));
}

Run matmul(PlanContext& c) {
  const DType dtype = c.inputs[0].dtype;
  Blas* blas = current_lane().blas;
  return [pieces = matmul_pieces(c.inputs[0].shape, c.inputs[1].shape, dtype), dtype, blas](const RunContext& r) {
    for (const Piece& p : pieces)
      blas->multiply(p.product, element(r.inputs[0], p.a, dtype), element(r.inputs[1], p.b, dtype),
                     const_cast<char*>(element(r.outputs[0], p.c, dtype)));
  };
}

KernelTable make_table() {
  KernelTable table;
  table.kernels.emplace("MatMul", Kernel{"MatMul", {DType::f32, DType::bf16}, LayoutRule::dense, matmul});
  return table;
}

}  // namespace

const KernelTable& cuda_kernels() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace onnxddp::cuda

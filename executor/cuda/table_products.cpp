// Matrix products by cuBLAS, convolutions by cuDNN.
#include <algorithm>

#include "executor/cuda/blas.h"
#include "executor/cuda/conv.h"
#include "executor/cuda/table_parts.h"

namespace onnxddp::cuda {
namespace {

/// One product, or several where batches are broadcast: first elements of the operands of each.
struct Piece {
  Product product;
  std::int64_t a = 0, b = 0, c = 0;
};

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

std::vector<Piece> matmul_pieces(const Ints& a, const Ints& b, DType dtype) {
  Product p;
  p.m = a[a.size() - 2];
  p.k = a.back();
  p.n = b.back();
  p.dtype = p.result = dtype;
  if (std::all_of(b.begin(), b.end() - 2, [](std::int64_t size) { return size == 1; })) {
    for (std::size_t d = 0; d + 2 < a.size(); ++d) p.m *= a[d];  // one matrix for all of a's rows
    return {{p}};
  }
  Ints batch(std::max(a.size(), b.size()) - 2, 1);
  for (const Ints* shape : {&a, &b})
    for (std::size_t i = 0; i + 2 < shape->size(); ++i) {
      std::int64_t& size = batch[batch.size() - 1 - i];
      const std::int64_t own = (*shape)[shape->size() - 3 - i];
      if (own != 1) size = own;
    }
  const Ints a_steps = batch_steps(a, batch), b_steps = batch_steps(b, batch);
  p.batch = batch.back();  // the last batch axis is one strided product
  p.stride_a = a_steps.back() * p.m * p.k;
  p.stride_b = b_steps.back() * p.k * p.n;
  p.stride_c = p.m * p.n;
  const std::int64_t total = numel(batch) / std::max<std::int64_t>(p.batch, 1);
  std::vector<Piece> pieces;
  for (std::int64_t i = 0; i < total; ++i) {
    Piece piece{p, 0, 0, i * p.batch * p.stride_c};
    std::int64_t rest = i;
    for (std::size_t axis = batch.size() - 1; axis-- > 0;) {
      piece.a += rest % batch[axis] * a_steps[axis] * p.m * p.k;
      piece.b += rest % batch[axis] * b_steps[axis] * p.k * p.n;
      rest /= batch[axis];
    }
    pieces.push_back(piece);
  }
  return pieces;
}

const void* element(const void* base, std::int64_t index, DType dtype) {
  return static_cast<const char*>(base) + index * static_cast<std::int64_t>(dtype_size(dtype));
}
void* element(void* base, std::int64_t index, DType dtype) {
  return static_cast<char*>(base) + index * static_cast<std::int64_t>(dtype_size(dtype));
}

Blas& blas() {
  CHECK(current_lane().blas != nullptr, "a matrix product on a lane without cuBLAS");
  return *current_lane().blas;
}

Run matmul(PlanContext& c) {
  const DType dtype = c.inputs[0].dtype;
  return [pieces = matmul_pieces(c.inputs[0].shape, c.inputs[1].shape, dtype), dtype](const RunContext& r) {
    for (const Piece& p : pieces)
      blas().multiply(p.product, element(r.inputs[0], p.a, dtype), element(r.inputs[1], p.b, dtype),
                      element(r.outputs[0], p.c, dtype));
  };
}

/// alpha * op(a) op(b) + beta * c: c is spread over y first, then the product is added to it.
Run gemm(PlanContext& c) {
  const Ints &a = c.inputs[0].shape, &y = c.outputs[0].shape;
  Product p;
  p.trans_a = c.flag("transA");
  p.trans_b = c.flag("transB");
  p.m = y[0];
  p.n = y[1];
  p.k = a[p.trans_a ? 0 : 1];
  p.dtype = p.result = c.outputs[0].dtype;
  p.alpha = static_cast<float>(c.number("alpha"));
  const bool addend = c.has(2);
  CopyPlan spread;
  if (addend) {
    p.beta = static_cast<float>(c.number("beta"));
    spread = plan_copy(y, c.outputs[0].strides(), broadcast_strides(c.inputs[2], y), dtype_size(p.dtype));
  }
  return [=](const RunContext& r) {
    if (addend) copy(spread, r.inputs[2], r.outputs[0], stream());
    blas().multiply(p, r.inputs[0], r.inputs[1], r.outputs[0]);
  };
}

}  // namespace

void add_products(KernelTable& table) {
  add(table, "MatMul", kFloats, matmul);
  add(table, "Gemm", kFloats, gemm);
}

namespace {

/// Operands of a convolution in the order of ConvProblem.
ConvProblem problem_of(const PlanContext& c, ConvKind kind, const SlotType& x, const SlotType& w) {
  const Ints strides = c.integers("strides"), pads = c.integers("pads"), dilations = c.integers("dilations");
  ConvProblem p;
  p.kind = kind;
  p.dtype = x.dtype;
  p.n = x.shape[0], p.c = x.shape[1], p.h = x.shape[2], p.w = x.shape[3];
  p.k = w.shape[0], p.r = w.shape[2], p.s = w.shape[3];
  p.top = pads[0], p.left = pads[1], p.bottom = pads[2], p.right = pads[3];
  p.stride_h = strides[0], p.stride_w = strides[1];
  p.dilation_h = dilations[0], p.dilation_w = dilations[1];
  p.group = c.integer("group");
  return p;
}

/// A convolution with what surrounds it: parameters are in ONNX's order, cuDNN wants them with the channels
/// last. Scratch: the weight in that order, then the plan's workspace.
class Convolution {
 public:
  /// Images must come in N,H,W,C: the table asks for it.
  Convolution(PlanContext& c, ConvKind kind, const SlotType& x, const SlotType& w, const SlotType& y)
      : kind_(kind), dtype_(x.dtype), result_(c.outputs[0].numel()) {
    for (const SlotType* image : {&x, &y})
      CHECK(image->layout == Layout::nhwc, "a convolution of images that are not N,H,W,C");
    if (x.numel() == 0 || w.numel() == 0 || y.numel() == 0) return;  // nothing to sum: zeros
    const SlotType last{w.dtype, w.shape, Layout::nhwc};
    const bool forth = kind != ConvKind::weight_grad;
    pack_ =
        plan_copy(w.shape, (forth ? last : w).strides(), (forth ? w : last).strides(), dtype_size(dtype_));
    packed_bytes_ = scratch_part(w.bytes());
    const Lane& lane = current_lane();
    CHECK(lane.cudnn != nullptr && lane.plans != nullptr, "a convolution on a lane without cuDNN");
    ConvOptions options;
    options.math = blas().math();
    plan_ =
        std::make_shared<const ConvPlan>(lane.plans->get(*lane.cudnn, problem_of(c, kind, x, w), options));
    c.scratch_bytes = packed_bytes_ + plan_->workspace_bytes();
  }

  void run(const RunContext& r) const {
    if (plan_ == nullptr) return fill(r.outputs[0], result_, 0, dtype_size(dtype_), stream());
    void* workspace = static_cast<char*>(r.scratch) + packed_bytes_;
    Cudnn& cudnn = *current_lane().cudnn;
    if (kind_ == ConvKind::weight_grad) {
      plan_->run(cudnn, r.inputs[0], r.inputs[1], r.scratch, workspace);
      copy(pack_, r.scratch, r.outputs[0], stream());
    } else {
      copy(pack_, r.inputs[1], r.scratch, stream());
      plan_->run(cudnn, r.inputs[0], r.scratch, r.outputs[0], workspace);
    }
  }

 private:
  ConvKind kind_;
  DType dtype_;
  std::int64_t result_;
  CopyPlan pack_;
  std::size_t packed_bytes_ = 0;
  std::shared_ptr<const ConvPlan> plan_;  // null: an operand is empty
};

Run conv(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  const Convolution convolution(c, ConvKind::forward, c.inputs[0], c.inputs[1], y);
  if (!c.has(2)) return [=](const RunContext& r) { convolution.run(r); };
  const SlotType bias{y.dtype, {c.inputs[2].numel(), 1, 1}};
  const BinaryKernel add_kernel = binary_kernel("Add", y.dtype);
  return [=, walk = walk_over<2>(y, {&y, &bias})](const RunContext& r) {
    convolution.run(r);
    add_kernel(walk, r.outputs[0], r.inputs[2], r.outputs[0], stream());
  };
}

}  // namespace

void add_convolutions(KernelTable& table) {
  add(table, "Conv", kFloats, conv);
  add(table, "ConvDataGrad", kFloats, [](PlanContext& c) -> Run {
    const Convolution convolution(c, ConvKind::data_grad, c.outputs[0], c.inputs[1], c.inputs[0]);
    return [=](const RunContext& r) { convolution.run(r); };
  });
  add(table, "ConvWeightGrad", kFloats, [](PlanContext& c) -> Run {
    const Convolution convolution(c, ConvKind::weight_grad, c.inputs[1], c.outputs[0], c.inputs[0]);
    return [=](const RunContext& r) { convolution.run(r); };
  });
}

}  // namespace onnxddp::cuda

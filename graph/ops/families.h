// The op families: one table of entries per file of this folder. The registry is their concatenation.
#pragma once

#include <span>

#include "graph/op.h"

namespace ONNXDDP_API onnxddp {

/// Unary, binary, comparisons, Where, Cast, Clip.
std::span<const OpDef> elementwise_ops();
/// MatMul, Gemm.
std::span<const OpDef> gemm_ops();
/// Convolution and pooling with their gradients.
std::span<const OpDef> conv_ops();
/// Batch normalization and its statistics, Softmax, LogSoftmax, Dropout.
std::span<const OpDef> norm_ops();
/// Reductions, SumTo, ArgMax, SumSquares.
std::span<const OpDef> reduce_ops();
/// Reshape, Transpose, Expand, Concat, Slice and what is made of them.
std::span<const OpDef> layout_ops();
/// Gather, Shape, Range, ConstantOfShape.
std::span<const OpDef> index_ops();
/// Cross entropy, negative log likelihood, target counts.
std::span<const OpDef> loss_ops();
/// Parameter updates.
std::span<const OpDef> optimizer_ops();
/// AllReduce, AllGather.
std::span<const OpDef> collective_ops();

}  // namespace onnxddp

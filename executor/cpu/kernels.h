// The families of the CPU's kernels; kernels.cpp puts them into one table.
#pragma once

#include "executor/kernel.h"
#include "executor/operands.h"

namespace onnxddp::cpu {

inline const std::vector<DType> kFloats = {DType::f32, DType::f64};
inline const std::vector<DType> kNumbers = {DType::f32, DType::f64, DType::i64, DType::i32};

/// Adds a kernel to the table.
inline void add(KernelTable& table, Kernel kernel) {
  std::string op = kernel.op;
  table.kernels.emplace(std::move(op), std::move(kernel));
}

void add_elementwise(KernelTable& table);
void add_reductions(KernelTable& table);
void add_losses(KernelTable& table);
void add_norms(KernelTable& table);
void add_pools(KernelTable& table);
void add_layouts(KernelTable& table);
void add_indexing(KernelTable& table);
void add_optimizers(KernelTable& table);
void add_collectives(KernelTable& table);
void add_products(KernelTable& table);  // MatMul, Gemm
void add_convolutions(KernelTable& table);

/// Layout rule of kernels that read the rank-4 inputs of one shape in the layout they come in (nhwc if any
/// is), and write rank-4 outputs of that shape in it; everything else is dense. `first`: index of the input
/// that gives the shape.
LayoutChoice same_layout(const PlanContext& context);

/// Reference convolutions: any layout and float type, plain loops.
Run reference_conv(const PlanContext& context);
Run reference_conv_data_grad(const PlanContext& context);
Run reference_conv_weight_grad(const PlanContext& context);

/// f32 by oneDNN; an empty function where oneDNN has no implementation.
Run dnnl_matmul(PlanContext& context);
/// `bias`: input 2 is a row that is added to every row; else it is left out, and so are alpha and beta.
Run dnnl_gemm(PlanContext& context, bool bias);
Run dnnl_conv(PlanContext& context);
Run dnnl_conv_data_grad(PlanContext& context);
Run dnnl_conv_weight_grad(PlanContext& context);

}  // namespace onnxddp::cpu

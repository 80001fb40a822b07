// Matrix multiplication for cuBLAS and cuBLASLt: plain loops, double accumulation.
#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cudaemu/core.h"

namespace cudaemu {

/// Column-major operand of a product; batches are `stride` elements apart.
struct Matrix {
  const void* data = nullptr;
  cudaDataType type = CUDA_R_32F;
  int64_t rows = 0, cols = 0, ld = 0, stride = 0;
  bool transposed = false;
};

/// D = epilogue(alpha * op(A) * op(B) + beta * C); op(A): m x k, op(B): k x n.
struct Gemm {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  double alpha = 1, beta = 0;
  Matrix a, b, c, d;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  cudaDataType bias_type = CUDA_R_32F;
  int64_t bias_stride = 0;
  void* aux = nullptr;
  int64_t aux_ld = 0, aux_stride = 0;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

size_t element_bytes(cudaDataType type);
double load_element(const void* p, cudaDataType type, int64_t i);
void store_element(void* p, cudaDataType type, int64_t i, double value);
/// alpha or beta in host memory, of the scale type.
double load_scalar(const void* p, cudaDataType type);
/// Checks shapes and epilogue and queues the product.
cublasStatus_t queue_gemm(const Gemm& gemm, cudaStream_t stream);

}  // namespace cudaemu

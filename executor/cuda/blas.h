// Matrix products of row-major matrices by cuBLAS, and products with an epilogue by cuBLASLt.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "executor/cuda/runtime.h"
#include "graph/types.h"

namespace onnxddp::cuda {

/// c = alpha * op(a) op(b) + beta * c, `batch` times. Row-major: a row of a matrix is contiguous, rows are `lda` elements
/// apart. op(a): m x k, op(b): k x n, c: m x n.
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false;
  std::int64_t lda = 0, ldb = 0, ldc = 0;  // 0: dense
  std::int64_t batch = 1;
  std::int64_t stride_a = 0, stride_b = 0, stride_c = 0;  // elements between batches; 0 for a or b: the same one each time
  float alpha = 1, beta = 0;
  DType dtype = DType::f32;  // of a and b: f32 or bf16; sums are formed in float
  DType result = DType::f32; // of c: dtype, or f32
};

/// What an f32 product may lose: strict is IEEE float, tf32 rounds the factors to 10 bits of mantissa (tensor cores).
enum class FloatMath : std::uint8_t { strict, tf32 };

/// A handle of cuBLAS and of cuBLASLt for one stream, with a workspace of its own: safe to capture, and equal bits in every run.
/// One thread at a time.
class Blas {
 public:
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what NVIDIA advises for Hopper

  explicit Blas(cudaStream_t stream, std::size_t workspace_bytes = kWorkspaceBytes);
  /// For f32 products from now on; strict at first.
  void set_math(FloatMath math);
  FloatMath math() const { return math_; }
  /// Queues the product. Empty results do nothing; k = 0 scales c by beta.
  void multiply(const Product& product, const void* a, const void* b, void* c);

  cudaStream_t stream() const { return stream_; }
  cublasLtHandle_t lt() const { return lt_.get(); }
  void* workspace() const { return workspace_.get(); }
  std::size_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  cudaStream_t stream_;
  DeviceMemory workspace_;
  Owned<cublasHandle_t, cublasDestroy_v2> handle_;
  Owned<cublasLtHandle_t, cublasLtDestroy> lt_;
  FloatMath math_ = FloatMath::strict;
};

/// What happens to a product on its way to memory. `bias` is a vector of n; GELU is the tanh form. The *_aux kinds also write
/// what the gradient needs: RELU a bit mask, GELU the value before it. relu_grad_bias and gelu_grad_bias read that aux, multiply
/// by the derivative, and write the sum over the m rows to bias.
enum class Epilogue : std::uint8_t {
  none, bias, relu, relu_bias, relu_aux_bias, gelu_bias, gelu_aux_bias, relu_grad_bias, gelu_grad_bias
};

/// A product with an epilogue, its algorithm chosen once. batch must be 1.
class FusedProduct {
 public:
  /// Null where this device and library have no algorithm within blas's workspace: the caller then multiplies and runs kernels of
  /// its own.
  static std::unique_ptr<FusedProduct> make(Blas& blas, const Product& product, Epilogue epilogue);
  /// Elements of the result's rows in aux: bits for the relu kinds, elements of `result` for gelu.
  std::int64_t aux_row() const { return aux_row_; }
  /// Bytes of aux; 0 if the epilogue has none.
  std::size_t aux_bytes() const;
  /// bias, aux: 16-byte aligned device memory, null where the epilogue has none.
  void run(const void* a, const void* b, void* c, void* bias, void* aux);

 private:
  FusedProduct(Blas& blas, const Product& product, Epilogue epilogue);
  bool choose();
  void set_layouts();

  Blas& blas_;
  Product product_;
  Epilogue epilogue_;
  std::int64_t aux_row_ = 0;
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation_;
  Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> first_, second_, result_;
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace onnxddp::cuda

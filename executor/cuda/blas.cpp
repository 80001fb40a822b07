// cuBLAS is column-major: what it calls C, rows n and columns m, is our row-major m x n matrix. So it
// computes c' = b' a' with the operands exchanged.
#include "executor/cuda/blas.h"

#include "executor/cuda/status.h"

namespace onnxddp::cuda {
namespace {

cudaDataType_t data_type(DType dtype) {
  CHECK(dtype == DType::f32 || dtype == DType::bf16, "a product of ", dtype_name(dtype));
  return dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

cublasOperation_t operation(bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

/// Fills in the dense row lengths.
Product completed(Product p) {
  CHECK(p.m >= 0 && p.n >= 0 && p.k >= 0 && p.batch >= 0, "sizes of a product");
  CHECK(p.result == p.dtype || p.result == DType::f32, "a product's result in ", dtype_name(p.result));
  if (p.lda == 0) p.lda = std::max<std::int64_t>(p.trans_a ? p.m : p.k, 1);
  if (p.ldb == 0) p.ldb = std::max<std::int64_t>(p.trans_b ? p.k : p.n, 1);
  if (p.ldc == 0) p.ldc = std::max<std::int64_t>(p.n, 1);
  return p;
}

/// cuBLAS takes int.
int narrow(std::int64_t size) {
  if (size > INT32_MAX)
    throw Error(cat("a matrix product with a dimension of ", size, " elements"))
        .hint("cuBLAS takes at most 2147483647");
  return static_cast<int>(size);
}

}  // namespace

Blas::Blas(cudaStream_t stream, std::size_t workspace_bytes) : stream_(stream), workspace_(workspace_bytes) {
  CUDA_OK(cublasCreate_v2(handle_.out()));
  CUDA_OK(cublasSetStream_v2(handle_.get(), stream));
  CUDA_OK(cublasSetWorkspace_v2(handle_.get(), workspace_.get(),
                                workspace_bytes));  // behind SetStream, which resets it
  CUDA_OK(cublasLtCreate(lt_.out()));
  set_math(FloatMath::strict);
}

void Blas::set_math(FloatMath math) {
  CUDA_OK(cublasSetMathMode(handle_.get(),
                            math == FloatMath::tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH));
  math_ = math;
}

void Blas::multiply(const Product& product, const void* a, const void* b, void* c) {
  const Product p = completed(product);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  const cudaDataType_t type = data_type(p.dtype), result = data_type(p.result);
  const int m = narrow(p.m), n = narrow(p.n), k = narrow(p.k);
  const int lda = narrow(p.lda), ldb = narrow(p.ldb), ldc = narrow(p.ldc);
  if (p.batch == 1) {
    CUDA_OK(cublasGemmEx(handle_.get(), operation(p.trans_b), operation(p.trans_a), n, m, k, &p.alpha, b,
                         type, ldb, a, type, lda, &p.beta, c, result, ldc, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT));
    return;
  }
  CUDA_OK(cublasGemmStridedBatchedEx(handle_.get(), operation(p.trans_b), operation(p.trans_a), n, m, k,
                                     &p.alpha, b, type, ldb, p.stride_b, a, type, lda, p.stride_a, &p.beta, c,
                                     result, ldc, p.stride_c, narrow(p.batch), CUBLAS_COMPUTE_32F,
                                     CUBLAS_GEMM_DEFAULT));
}

namespace {

cublasLtEpilogue_t lt_epilogue(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::none: return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::bias: return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::relu: return CUBLASLT_EPILOGUE_RELU;
    case Epilogue::relu_bias: return CUBLASLT_EPILOGUE_RELU_BIAS;
    case Epilogue::relu_aux_bias: return CUBLASLT_EPILOGUE_RELU_AUX_BIAS;
    case Epilogue::gelu_bias: return CUBLASLT_EPILOGUE_GELU_BIAS;
    case Epilogue::gelu_aux_bias: return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::relu_grad_bias: return CUBLASLT_EPILOGUE_DRELU_BGRAD;
    case Epilogue::gelu_grad_bias: return CUBLASLT_EPILOGUE_DGELU_BGRAD;
  }
  CHECK(false, "epilogue ", static_cast<int>(epilogue));
}

bool has_bias(Epilogue e) { return e != Epilogue::none && e != Epilogue::relu; }
bool is_relu_mask(Epilogue e) { return e == Epilogue::relu_aux_bias || e == Epilogue::relu_grad_bias; }
bool is_gelu_aux(Epilogue e) { return e == Epilogue::gelu_aux_bias || e == Epilogue::gelu_grad_bias; }

std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

template <class T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  CUDA_OK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

}  // namespace

FusedProduct::FusedProduct(Blas& blas, const Product& product, Epilogue epilogue)
    : blas_(blas), product_(completed(product)), epilogue_(epilogue) {
  CHECK(product_.batch == 1, "a batched product with an epilogue");
  if (is_relu_mask(epilogue_)) aux_row_ = round_up(product_.n, 128);  // cuBLASLt's rule for bit masks
  if (is_gelu_aux(epilogue_)) aux_row_ = round_up(product_.n, 8);
}

std::size_t FusedProduct::aux_bytes() const {
  const auto elements = static_cast<std::size_t>(aux_row_ * product_.m);
  return is_relu_mask(epilogue_) ? elements / 8 : elements * dtype_size(product_.result);
}

void FusedProduct::set_layouts() {
  const Product& p = product_;
  const auto layout = [](Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>& to, DType dtype,
                         std::int64_t rows, std::int64_t columns, std::int64_t ld) {
    CUDA_OK(cublasLtMatrixLayoutCreate(to.out(), data_type(dtype), static_cast<std::uint64_t>(rows),
                                       static_cast<std::uint64_t>(columns), ld));
  };
  layout(first_, p.dtype, p.trans_b ? p.k : p.n, p.trans_b ? p.n : p.k, p.ldb);
  layout(second_, p.dtype, p.trans_a ? p.m : p.k, p.trans_a ? p.k : p.m, p.lda);
  layout(result_, p.result, p.n, p.m, p.ldc);
}

bool FusedProduct::choose() {
  const bool tf32 = product_.dtype == DType::f32 && blas_.math() == FloatMath::tf32;
  CUDA_OK(cublasLtMatmulDescCreate(operation_.out(), tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                   CUDA_R_32F));
  set(operation_.get(), CUBLASLT_MATMUL_DESC_TRANSA, operation(product_.trans_b));
  set(operation_.get(), CUBLASLT_MATMUL_DESC_TRANSB, operation(product_.trans_a));
  set(operation_.get(), CUBLASLT_MATMUL_DESC_EPILOGUE, lt_epilogue(epilogue_));
  if (aux_row_ != 0) set(operation_.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_row_);
  if (has_bias(epilogue_))
    set(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(product_.result));
  if (is_gelu_aux(epilogue_))
    set(operation_.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, data_type(product_.result));
  set_layouts();
  Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
  CUDA_OK(cublasLtMatmulPreferenceCreate(preference.out()));
  const std::size_t limit = blas_.workspace_bytes();
  CUDA_OK(cublasLtMatmulPreferenceSetAttribute(preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &limit, sizeof limit));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(blas_.lt(), operation_.get(), first_.get(), second_.get(), result_.get(),
                                     result_.get(), preference.get(), 1, &best, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) return false;
  CUDA_OK(status);
  algorithm_ = best.algo;
  return best.state == CUBLAS_STATUS_SUCCESS;
}

std::unique_ptr<FusedProduct> FusedProduct::make(Blas& blas, const Product& product, Epilogue epilogue) {
  std::unique_ptr<FusedProduct> fused(new FusedProduct(blas, product, epilogue));
  if (product.m == 0 || product.n == 0 || product.k == 0 || !fused->choose()) return nullptr;
  return fused;
}

void FusedProduct::run(const void* a, const void* b, void* c, void* bias, void* aux) {
  CHECK((bias != nullptr) == has_bias(epilogue_) && (aux != nullptr) == (aux_row_ != 0),
        "operands of an epilogue");
  if (bias != nullptr) set(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (aux != nullptr) set(operation_.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
  CUDA_OK(cublasLtMatmul(blas_.lt(), operation_.get(), &product_.alpha, b, first_.get(), a, second_.get(),
                         &product_.beta, c, result_.get(), c, result_.get(), &algorithm_, blas_.workspace(),
                         blas_.workspace_bytes(), blas_.stream()));
}

}  // namespace onnxddp::cuda

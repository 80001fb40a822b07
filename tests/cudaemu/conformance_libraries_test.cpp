// What the emulator promises of cuBLAS, cuBLASLt and, with one rank, NCCL; runs unchanged on a real device.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cmath>
#include <vector>

#include "tests/cudaemu/conformance.h"
#include "tests/cudaemu/test_kernels.h"

#define BLAS_OK(expression) ASSERT_EQ(expression, CUBLAS_STATUS_SUCCESS)
#define NCCL_OK(expression) ASSERT_EQ(expression, ncclSuccess)

namespace cudaemu_test {
namespace {

class Libraries : public ConformanceTest {};
INSTANTIATE_TEST_SUITE_P(Schedules, Libraries, schedules());

std::vector<float> numbers(size_t n, int seed) {
  std::vector<float> out(n);
  for (size_t i = 0; i < n; ++i)
    out[i] = static_cast<float>(static_cast<int>((i * 7919 + static_cast<size_t>(seed) * 31) % 17) - 8) / 4;
  return out;
}

float at(const std::vector<float>& x, bool transposed, int64_t ld, int64_t row, int64_t col) {
  return x[static_cast<size_t>(transposed ? row * ld + col : col * ld + row)];
}

// op(A) * op(B), column-major, exact: the inputs are small multiples of 1/4.
std::vector<float> product(const std::vector<float>& a, bool ta, int64_t lda, const std::vector<float>& b,
                           bool tb, int64_t ldb, int64_t m, int64_t n, int64_t k) {
  std::vector<float> c(static_cast<size_t>(m * n), 0.0f);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < m; ++i)
      for (int64_t p = 0; p < k; ++p)
        c[static_cast<size_t>(j * m + i)] += at(a, ta, lda, i, p) * at(b, tb, ldb, p, j);
  return c;
}

struct Blas {
  explicit Blas(cudaStream_t stream) : workspace(1 << 20) {
    EXPECT_EQ(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasSetStream(handle, stream), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasSetWorkspace(handle, workspace.get(), 4 << 20), CUBLAS_STATUS_SUCCESS);
  }
  ~Blas() { EXPECT_EQ(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS); }
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  cublasHandle_t handle = nullptr;
  Buffer<float> workspace;
};

TEST_P(Libraries, GemmInAllTranspositions) {
  Stream stream;
  Blas blas(stream);
  int version = 0;
  BLAS_OK(cublasGetVersion(blas.handle, &version));
  EXPECT_GE(version, 120000);
  BLAS_OK(cublasSetMathMode(blas.handle, CUBLAS_DEFAULT_MATH));
  const int m = 5, n = 7, k = 9;
  for (int flags = 0; flags < 4; ++flags) {
    const bool ta = (flags & 1) != 0, tb = (flags & 2) != 0;
    const int lda = (ta ? k : m) + 1, ldb = (tb ? n : k) + 2;
    const auto a = numbers(static_cast<size_t>(lda * (ta ? m : k)), 1),
               b = numbers(static_cast<size_t>(ldb * (tb ? k : n)), 2);
    const auto c0 = numbers(static_cast<size_t>(m * n), 3);
    Buffer<float> da(a, stream), db(b, stream), dc(c0, stream);
    const float alpha = 2.0f, beta = 0.5f;
    BLAS_OK(cublasGemmEx(blas.handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k,
                         &alpha, da.get(), CUDA_R_32F, lda, db.get(), CUDA_R_32F, ldb, &beta, dc.get(),
                         CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    auto expected = product(a, ta, lda, b, tb, ldb, m, n, k);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = 2 * expected[i] + 0.5f * c0[i];
    EXPECT_EQ(dc.read(stream), expected) << flags;
  }
}

TEST_P(Libraries, BatchedGemmOfBf16) {
  Stream stream;
  Blas blas(stream);
  const int m = 3, n = 4, k = 8, batch = 3;
  const auto a = numbers(m * k * batch, 1), b = numbers(k * n * batch, 2);
  std::vector<__nv_bfloat16> ah, bh;
  for (float v : a) ah.push_back(__float2bfloat16(v));
  for (float v : b) bh.push_back(__float2bfloat16(v));
  Buffer<__nv_bfloat16> da(ah, stream), db(bh, stream);
  Buffer<float> dc(m * n * batch);
  const float one = 1, zero = 0;
  BLAS_OK(cublasGemmStridedBatchedEx(blas.handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, da.get(),
                                     CUDA_R_16BF, m, m * k, db.get(), CUDA_R_16BF, k, k * n, &zero, dc.get(),
                                     CUDA_R_32F, m, m * n, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  const auto out = dc.read(stream);
  for (int i = 0; i < batch; ++i) {
    const std::vector<float> ai(a.begin() + i * m * k, a.begin() + (i + 1) * m * k),
        bi(b.begin() + i * k * n, b.begin() + (i + 1) * k * n);
    EXPECT_EQ(std::vector<float>(out.begin() + i * m * n, out.begin() + (i + 1) * m * n),
              product(ai, false, m, bi, false, k, m, n, k));
  }
}

TEST_P(Libraries, BadLeadingDimensionIsRefused) {
  Stream stream;
  Blas blas(stream);
  Buffer<float> x(numbers(64, 1), stream), y(64);
  const float one = 1, zero = 0;
  EXPECT_EQ(
      cublasGemmEx(blas.handle, CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, &one, x.get(), CUDA_R_32F, 4, x.get(),
                   CUDA_R_32F, 8, &zero, y.get(), CUDA_R_32F, 8, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_NE(std::string(cublasGetStatusString(CUBLAS_STATUS_INVALID_VALUE)), "");
  CUDA_OK(cudaStreamSynchronize(stream));
}

// One cuBLASLt product D = epilogue(A * B) of column-major float matrices.
class LtProduct {
 public:
  LtProduct(int m, int n, int k, cublasLtEpilogue_t epilogue) : m_(m), n_(n), workspace_(1 << 20) {
    EXPECT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescCreate(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(
        cublasLtMatrixLayoutCreate(&a_, CUDA_R_32F, static_cast<uint64_t>(m), static_cast<uint64_t>(k), m),
        CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(
        cublasLtMatrixLayoutCreate(&b_, CUDA_R_32F, static_cast<uint64_t>(k), static_cast<uint64_t>(n), k),
        CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(
        cublasLtMatrixLayoutCreate(&d_, CUDA_R_32F, static_cast<uint64_t>(m), static_cast<uint64_t>(n), m),
        CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference_), CUBLAS_STATUS_SUCCESS);
    const uint64_t bytes = 4 << 20;
    EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &bytes, sizeof bytes),
              CUBLAS_STATUS_SUCCESS);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  }
  ~LtProduct() {
    EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference_), CUBLAS_STATUS_SUCCESS);
    for (auto layout : {a_, b_, d_}) EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescDestroy(desc_), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtDestroy(handle_), CUBLAS_STATUS_SUCCESS);
  }
  LtProduct(const LtProduct&) = delete;
  LtProduct& operator=(const LtProduct&) = delete;

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(desc_, attribute, &value, sizeof value), CUBLAS_STATUS_SUCCESS);
  }
  void aux(void* p, int64_t ld) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
  }
  void bias(void* p) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p); }

  std::vector<float> run(const float* a, const float* b, cudaStream_t stream) {
    Buffer<float> d(m_ * n_);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(handle_, desc_, a_, b_, d_, d_, preference_, 1, &result, &found),
              CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(found, 1);
    const float one = 1, zero = 0;
    EXPECT_EQ(cublasLtMatmul(handle_, desc_, &one, a, a_, b, b_, &zero, d.get(), d_, d.get(), d_,
                             &result.algo, workspace_.get(), 4 << 20, stream),
              CUBLAS_STATUS_SUCCESS);
    return d.read(stream);
  }

 private:
  int m_, n_;
  Buffer<float> workspace_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
};

constexpr int kM = 16, kN = 8, kK = 24;

struct Operands {
  explicit Operands(cudaStream_t stream)
      : a(numbers(kM * kK, 1)),
        b(numbers(kK * kN, 2)),
        bias(numbers(kM, 3)),
        da(a, stream),
        db(b, stream),
        dbias(bias, stream) {}
  std::vector<float> a, b, bias;
  Buffer<float> da, db, dbias;
  std::vector<float> plain() const { return product(a, false, kM, b, false, kK, kM, kN, kK); }
  std::vector<float> biased() const {
    auto out = plain();
    for (size_t i = 0; i < out.size(); ++i) out[i] += bias[i % kM];
    return out;
  }
};

float relu(float x) { return x > 0 ? x : 0; }
float gelu(float x) { return 0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

TEST_P(Libraries, LtForwardEpilogues) {
  Stream stream;
  Operands x(stream);
  EXPECT_GE(cublasLtGetVersion(), 120000u);
  EXPECT_NE(std::string(cublasLtGetStatusString(CUBLAS_STATUS_NOT_SUPPORTED)), "");
  struct Case {
    cublasLtEpilogue_t epilogue;
    bool bias;
    float (*function)(float);
  };
  const auto same = [](float v) { return v; };
  for (const Case& c :
       {Case{CUBLASLT_EPILOGUE_DEFAULT, false, same}, Case{CUBLASLT_EPILOGUE_BIAS, true, same},
        Case{CUBLASLT_EPILOGUE_RELU, false, relu}, Case{CUBLASLT_EPILOGUE_RELU_BIAS, true, relu},
        Case{CUBLASLT_EPILOGUE_GELU, false, gelu}, Case{CUBLASLT_EPILOGUE_GELU_BIAS, true, gelu}}) {
    LtProduct lt(kM, kN, kK, c.epilogue);
    if (c.bias) lt.bias(x.dbias.get());
    const auto expected = c.bias ? x.biased() : x.plain();
    const auto out = lt.run(x.da.get(), x.db.get(), stream);
    for (size_t i = 0; i < out.size(); ++i)
      ASSERT_NEAR(out[i], c.function(expected[i]), 2e-4) << c.epilogue << " " << i;
  }
}

// Forward stores what backward needs: the bits of ReLU, the input of GELU.
TEST_P(Libraries, LtForwardAndBackwardThroughAux) {
  Stream stream;
  Operands x(stream);
  const auto forward = x.biased(), upstream = x.plain();
  {
    Buffer<unsigned char> bits(128 / 8 * kN);
    LtProduct up(kM, kN, kK, CUBLASLT_EPILOGUE_RELU_AUX_BIAS),
        down(kM, kN, kK, CUBLASLT_EPILOGUE_DRELU_BGRAD);
    CUDA_OK(cudaMemsetAsync(bits.get(), 0, 128 / 8 * kN, stream));
    up.bias(x.dbias.get());
    up.aux(bits.get(), 128);
    const auto y = up.run(x.da.get(), x.db.get(), stream);
    Buffer<float> gradient(kM);
    down.bias(gradient.get());
    down.aux(bits.get(), 128);
    const auto dx = down.run(x.da.get(), x.db.get(), stream), db = gradient.read(stream);
    for (size_t i = 0; i < kM; ++i) {
      float sum = 0;
      for (size_t j = 0; j < kN; ++j) {
        EXPECT_EQ(y[j * kM + i], relu(forward[j * kM + i]));
        EXPECT_EQ(dx[j * kM + i], forward[j * kM + i] > 0 ? upstream[j * kM + i] : 0);
        sum += dx[j * kM + i];
      }
      EXPECT_NEAR(db[i], sum, 1e-4);
    }
  }
  Buffer<float> input(kM * kN);
  LtProduct up(kM, kN, kK, CUBLASLT_EPILOGUE_GELU_AUX_BIAS), down(kM, kN, kK, CUBLASLT_EPILOGUE_DGELU_BGRAD);
  up.bias(x.dbias.get());
  up.aux(input.get(), kM);
  up.run(x.da.get(), x.db.get(), stream);
  EXPECT_EQ(input.read(stream), forward);
  Buffer<float> gradient(kM);
  down.bias(gradient.get());
  down.aux(input.get(), kM);
  const auto dx = down.run(x.da.get(), x.db.get(), stream);
  for (size_t i = 0; i < dx.size(); ++i) {
    const float h = 1e-2f, v = forward[i];
    EXPECT_NEAR(dx[i], upstream[i] * (gelu(v + h) - gelu(v - h)) / (2 * h),
                2e-2 * (1 + std::abs(upstream[i])));
  }
}

TEST_P(Libraries, LtSumsOfTheOperands) {
  Stream stream;
  Operands x(stream);
  Buffer<float> rows(kM), cols(kN);
  LtProduct a(kM, kN, kK, CUBLASLT_EPILOGUE_BGRADA), b(kM, kN, kK, CUBLASLT_EPILOGUE_BGRADB);
  a.bias(rows.get());
  b.bias(cols.get());
  EXPECT_EQ(a.run(x.da.get(), x.db.get(), stream), x.plain());
  EXPECT_EQ(b.run(x.da.get(), x.db.get(), stream), x.plain());
  const auto row_sums = rows.read(stream), col_sums = cols.read(stream);
  for (size_t i = 0; i < kM; ++i) {
    float sum = 0;
    for (size_t p = 0; p < kK; ++p) sum += x.a[p * kM + i];
    EXPECT_EQ(row_sums[i], sum);
  }
  for (size_t j = 0; j < kN; ++j) {
    float sum = 0;
    for (size_t p = 0; p < kK; ++p) sum += x.b[j * kK + p];
    EXPECT_EQ(col_sums[j], sum);
  }
}

TEST_P(Libraries, NcclOfOneRankCapturedAndNot) {
  Stream stream;
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  NCCL_OK(ncclGetUniqueId(&id));
  NCCL_OK(ncclCommInitRank(&comm, 1, id, 0));
  int count = 0, rank = -1;
  NCCL_OK(ncclCommCount(comm, &count));
  NCCL_OK(ncclCommUserRank(comm, &rank));
  EXPECT_EQ(count, 1);
  EXPECT_EQ(rank, 0);
  const auto in = numbers(100, 1);
  {
    Buffer<float> x(in, stream), y(100);
    NCCL_OK(ncclAllReduce(x.get(), y.get(), 100, ncclFloat32, ncclSum, comm, stream));
    EXPECT_EQ(y.read(stream), in);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    axpy(1.0f, x.get(), y.get(), 100, stream);
    NCCL_OK(ncclAllReduce(y.get(), y.get(), 100, ncclFloat32, ncclSum, comm, stream));
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; ++i) CUDA_OK(cudaGraphLaunch(exec, stream));
    auto expected = in;
    for (float& v : expected) v *= 4;
    EXPECT_EQ(y.read(stream), expected);
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  ncclResult_t error = ncclInternalError;
  NCCL_OK(ncclCommGetAsyncError(comm, &error));
  EXPECT_EQ(error, ncclSuccess);
  NCCL_OK(ncclCommFinalize(comm));
  NCCL_OK(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace cudaemu_test

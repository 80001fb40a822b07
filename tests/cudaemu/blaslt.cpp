// cuBLASLt: descriptors and Matmul with epilogues. Descriptors live in their public opaque structs' places as
// objects of our own behind the same pointer types.
#include <cstring>

#include "tests/cudaemu/gemm.h"

using namespace cudaemu;

namespace {

struct Desc {
  cudaDataType scale_type;
  int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  int32_t bias_type = -1;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  void* aux = nullptr;
  int64_t bias_stride = 0, aux_ld = 0, aux_stride = 0;
};

struct Layout {
  uint32_t type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;
};

struct Preference {
  uint64_t workspace_bytes = 0;
};

Desc& of(cublasLtMatmulDesc_t p) { return *reinterpret_cast<Desc*>(p); }
Layout& of(cublasLtMatrixLayout_t p) { return *reinterpret_cast<Layout*>(p); }
Preference& of(cublasLtMatmulPreference_t p) { return *reinterpret_cast<Preference*>(p); }

template <class T>
cublasStatus_t assign(T& field, const void* value, size_t bytes) {
  if (value == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

// For attributes whose only emulated value is the default.
template <class T>
cublasStatus_t expect(T fixed, const void* value, size_t bytes, const char* name) {
  T given;
  if (cublasStatus_t s = assign(given, value, bytes); s != CUBLAS_STATUS_SUCCESS) return s;
  if (given != fixed) not_emulated(name);
  return CUBLAS_STATUS_SUCCESS;
}

Matrix matrix(const void* p, const Layout& l, bool transposed) {
  return {p,
          static_cast<cudaDataType>(l.type),
          static_cast<int64_t>(l.rows),
          static_cast<int64_t>(l.cols),
          l.ld,
          l.stride,
          transposed};
}

// Shapes of A, B, C, D must fit, as cublasLtMatmul demands.
bool shapes_fit(const Desc& d, const Layout& a, const Layout& b, const Layout& c, const Layout& out) {
  const uint64_t m = d.trans_a != 0 ? a.cols : a.rows, ka = d.trans_a != 0 ? a.rows : a.cols;
  const uint64_t n = d.trans_b != 0 ? b.rows : b.cols, kb = d.trans_b != 0 ? b.cols : b.rows;
  const bool batches = a.batch == out.batch && b.batch == out.batch && c.batch == out.batch;
  return ka == kb && out.rows == m && out.cols == n && c.rows == m && c.cols == n && batches;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasGetStatusString(status); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_FAST_TF32 &&
      compute != CUBLAS_COMPUTE_64F)
    not_emulated("cuBLASLt compute type " + std::to_string(compute));
  *out = reinterpret_cast<cublasLtMatmulDesc_t>(new Desc{scale});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete &of(desc);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  Desc& d = of(desc);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(d.trans_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(d.trans_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(d.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(d.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return assign(d.bias_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return assign(d.bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return assign(d.aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return assign(d.aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return assign(d.aux_stride, value, bytes);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return expect<int32_t>(CUBLASLT_POINTER_MODE_HOST, value, bytes, "cuBLASLt pointer modes");
    default: not_emulated("cuBLASLt matmul attribute " + std::to_string(attribute));
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
  *out = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{static_cast<uint32_t>(type), rows, cols, ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete &of(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  Layout& l = of(layout);
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return assign(l.type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return assign(l.rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return assign(l.cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD: return assign(l.ld, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return assign(l.batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return assign(l.stride, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return expect<int32_t>(CUBLASLT_ORDER_COL, value, bytes, "cuBLASLt orders other than column-major");
    default: not_emulated("cuBLASLt layout attribute " + std::to_string(attribute));
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  *out = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete &of(preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  uint32_t ignored;  // alignments and search hints change nothing here
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return assign(of(preference).workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return assign(ignored, value, bytes);
    default: not_emulated("cuBLASLt preference attribute " + std::to_string(attribute));
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  if (wanted < 1 || !shapes_fit(of(desc), of(a), of(b), of(c), of(d))) return CUBLAS_STATUS_INVALID_VALUE;
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].wavesCount = 1.0f;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t*, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  Lock lock;
  if (handle == nullptr || desc == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Desc& s = of(desc);
  const Layout &la = of(a_layout), &lb = of(b_layout), &lc = of(c_layout), &ld = of(d_layout);
  if (!shapes_fit(s, la, lb, lc, ld)) return CUBLAS_STATUS_INVALID_VALUE;
  Gemm g;
  g.m = static_cast<int64_t>(ld.rows);
  g.n = static_cast<int64_t>(ld.cols);
  g.k = static_cast<int64_t>(s.trans_a != 0 ? la.rows : la.cols);
  g.batch = ld.batch;
  g.alpha = load_scalar(alpha, s.scale_type);
  g.beta = load_scalar(beta, s.scale_type);
  g.a = matrix(a, la, s.trans_a != 0);
  g.b = matrix(b, lb, s.trans_b != 0);
  g.c = matrix(c, lc, false);
  g.d = matrix(d, ld, false);
  g.epilogue = static_cast<cublasLtEpilogue_t>(s.epilogue);
  g.bias = s.bias;
  g.bias_type = static_cast<cudaDataType>(s.bias_type < 0 ? static_cast<int32_t>(ld.type) : s.bias_type);
  g.bias_stride = s.bias_stride;
  g.aux = s.aux;
  g.aux_ld = s.aux_ld;
  g.aux_stride = s.aux_stride;
  g.workspace = workspace;
  g.workspace_bytes = workspace == nullptr ? 0 : workspace_bytes;
  return queue_gemm(g, stream);
}

}  // extern "C"

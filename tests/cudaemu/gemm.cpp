#include "tests/cudaemu/gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

namespace cudaemu {
namespace {

constexpr int kBias = CUBLASLT_EPILOGUE_BIAS, kRelu = CUBLASLT_EPILOGUE_RELU, kGelu = CUBLASLT_EPILOGUE_GELU;
constexpr int kAux = 128, kDrelu = 8, kDgelu = 64, kBiasGradient = 16;

bool has(const Gemm& g, int bits) { return (static_cast<int>(g.epilogue) & bits) == bits; }
bool reads_aux(const Gemm& g) { return has(g, kDrelu) || has(g, kDgelu); }
bool writes_aux(const Gemm& g) { return has(g, kAux) && !reads_aux(g); }
bool uses_mask(const Gemm& g) { return has(g, kRelu | kAux) || has(g, kDrelu); }
int64_t bias_length(const Gemm& g) { return has(g, CUBLASLT_EPILOGUE_BGRADB) ? g.n : g.m; }
bool uses_bias(const Gemm& g) {
  return has(g, kBias) || has(g, kBiasGradient) || has(g, CUBLASLT_EPILOGUE_BGRADA) ||
         has(g, CUBLASLT_EPILOGUE_BGRADB);
}

bool known_epilogue(cublasLtEpilogue_t e) {
  switch (e) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_RELU_AUX:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_RELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DRELU:
    case CUBLASLT_EPILOGUE_DRELU_BGRAD:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB: return true;
    default: return false;
  }
}

// op(x) as doubles, with `outer` columns of `inner` elements each.
std::vector<double> pack(const Matrix& x, int64_t batch, int64_t inner, int64_t outer, bool swap) {
  std::vector<double> out(static_cast<size_t>(inner * outer));
  const int64_t base = batch * x.stride;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t i = 0; i < inner; ++i)
      out[static_cast<size_t>(o * inner + i)] =
          load_element(x.data, x.type, base + (swap ? i * x.ld + o : o * x.ld + i));
  return out;
}

constexpr double kGeluA = 0.7978845608028654, kGeluB = 0.044715;  // sqrt(2 / pi); the tanh form

double gelu(double x) { return 0.5 * x * (1 + std::tanh(kGeluA * (x + kGeluB * x * x * x))); }
double gelu_gradient(double x) {
  const double t = std::tanh(kGeluA * (x + kGeluB * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kGeluA * (1 + 3 * kGeluB * x * x);
}

double finish(const Gemm& g, double v, int64_t batch, int64_t i, int64_t j) {
  auto* mask = static_cast<unsigned char*>(g.aux);
  const int64_t aux = batch * g.aux_stride + j * g.aux_ld + i;
  if (has(g, kDrelu)) return (mask[aux / 8] >> (aux % 8) & 1) != 0 ? v : 0;
  if (has(g, kDgelu)) return v * gelu_gradient(load_element(g.aux, g.d.type, aux));
  if (has(g, kBias)) v += load_element(g.bias, g.bias_type, batch * g.bias_stride + i);
  if (has(g, kRelu)) {
    if (has(g, kAux)) {
      const auto bit = static_cast<unsigned char>(1u << (aux % 8));
      mask[aux / 8] = static_cast<unsigned char>(v > 0 ? mask[aux / 8] | bit : mask[aux / 8] & ~bit);
    }
    return v > 0 || std::isnan(v) ? v : 0;
  }
  if (has(g, kGelu)) {
    if (has(g, kAux)) store_element(g.aux, g.d.type, aux, v);
    return gelu(v);
  }
  return v;
}

void sum_operand(const Gemm& g, int64_t batch, const std::vector<double>& a, const std::vector<double>& b) {
  const bool of_a = has(g, CUBLASLT_EPILOGUE_BGRADA);
  for (int64_t i = 0; i < bias_length(g); ++i) {
    double sum = 0;
    for (int64_t p = 0; p < g.k; ++p)
      sum += of_a ? a[static_cast<size_t>(p * g.m + i)] : b[static_cast<size_t>(i * g.k + p)];
    store_element(g.bias, g.bias_type, batch * g.bias_stride + i, sum);
  }
}

void run_batch(const Gemm& g, int64_t batch) {
  const auto a = pack(g.a, batch, g.m, g.k, g.a.transposed), b = pack(g.b, batch, g.k, g.n, g.b.transposed);
  std::vector<double> column(static_cast<size_t>(g.m)),
      gradient(has(g, kBiasGradient) ? column.size() : 0, 0.0);
  auto* d = const_cast<void*>(g.d.data);
  for (int64_t j = 0; j < g.n; ++j) {
    std::fill(column.begin(), column.end(), 0.0);
    for (int64_t p = 0; p < g.k; ++p) {
      const double factor = b[static_cast<size_t>(j * g.k + p)];
      const double* from = a.data() + p * g.m;
      for (int64_t i = 0; i < g.m; ++i) column[static_cast<size_t>(i)] += from[i] * factor;
    }
    for (int64_t i = 0; i < g.m; ++i) {
      double v = g.alpha * column[static_cast<size_t>(i)];
      if (g.beta != 0) v += g.beta * load_element(g.c.data, g.c.type, batch * g.c.stride + j * g.c.ld + i);
      v = finish(g, v, batch, i, j);
      store_element(d, g.d.type, batch * g.d.stride + j * g.d.ld + i, v);
      if (!gradient.empty()) gradient[static_cast<size_t>(i)] += v;
    }
  }
  for (size_t i = 0; i < gradient.size(); ++i)
    store_element(g.bias, g.bias_type, batch * g.bias_stride + static_cast<int64_t>(i), gradient[i]);
  if (has(g, CUBLASLT_EPILOGUE_BGRADA) || has(g, CUBLASLT_EPILOGUE_BGRADB)) sum_operand(g, batch, a, b);
}

Access whole(const Matrix& x, int64_t batch, bool read, bool write) {
  const int64_t elements = (batch - 1) * x.stride + (x.cols - 1) * x.ld + x.rows;
  return {x.data, x.cols == 0 ? 0 : static_cast<size_t>(elements) * element_bytes(x.type), read, write};
}

std::vector<Access> touched(const Gemm& g) {
  std::vector<Access> out;
  if (g.k > 0) {
    out.push_back(whole(g.a, g.batch, true, false));
    out.push_back(whole(g.b, g.batch, true, false));
  }
  if (g.beta != 0) out.push_back(whole(g.c, g.batch, true, false));
  out.push_back(whole(g.d, g.batch, false, true));
  if (uses_bias(g)) {
    const auto length = static_cast<size_t>((g.batch - 1) * g.bias_stride + bias_length(g));
    out.push_back({g.bias, length * element_bytes(g.bias_type), has(g, kBias), !has(g, kBias)});
  }
  if (has(g, kAux)) {
    const auto elements = static_cast<size_t>((g.batch - 1) * g.aux_stride + g.n * g.aux_ld);
    out.push_back({g.aux, uses_mask(g) ? elements / 8 : elements * element_bytes(g.d.type), reads_aux(g),
                   writes_aux(g)});
  }
  if (g.workspace_bytes > 0) out.push_back({g.workspace, g.workspace_bytes, false, true});
  return out;
}

bool valid(const Gemm& g) {
  for (const Matrix* x : {&g.a, &g.b, &g.c, &g.d})
    if (x->rows < 0 || x->cols < 0 || x->ld < std::max<int64_t>(1, x->rows)) return false;
  if (uses_bias(g) && g.bias == nullptr) return false;
  return !has(g, kAux) || (g.aux != nullptr && g.aux_ld >= g.m && g.aux_ld % (uses_mask(g) ? 128 : 8) == 0);
}

}  // namespace

size_t element_bytes(cudaDataType type) {
  switch (type) {
    case CUDA_R_64F: return 8;
    case CUDA_R_32F: return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 2;
    default: not_emulated("matrices of data type " + std::to_string(type));
  }
}

double load_element(const void* p, cudaDataType type, int64_t i) {
  switch (type) {
    case CUDA_R_64F: return static_cast<const double*>(p)[i];
    case CUDA_R_32F: return static_cast<double>(static_cast<const float*>(p)[i]);
    case CUDA_R_16F: return static_cast<double>(__half2float(static_cast<const __half*>(p)[i]));
    default: return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]));
  }
}

void store_element(void* p, cudaDataType type, int64_t i, double value) {
  switch (type) {
    case CUDA_R_64F: static_cast<double*>(p)[i] = value; break;
    case CUDA_R_32F: static_cast<float*>(p)[i] = static_cast<float>(value); break;
    case CUDA_R_16F: static_cast<__half*>(p)[i] = __float2half(static_cast<float>(value)); break;
    default: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(static_cast<float>(value));
  }
}

double load_scalar(const void* p, cudaDataType type) {
  if (is_device(p)) not_emulated("matrix factors in device memory");
  return load_element(p, type, 0);
}

cublasStatus_t queue_gemm(const Gemm& g, cudaStream_t stream) {
  if (!known_epilogue(g.epilogue)) not_emulated("cuBLASLt epilogue " + std::to_string(g.epilogue));
  if (!valid(g)) return CUBLAS_STATUS_INVALID_VALUE;
  if (g.m == 0 || g.n == 0 || g.batch == 0) return CUBLAS_STATUS_SUCCESS;
  Op op;
  op.name = "gemm " + std::to_string(g.m) + "x" + std::to_string(g.n) + "x" + std::to_string(g.k);
  op.touched = touched(g);
  op.run = [g] {
    for (int64_t i = 0; i < g.batch; ++i) run_batch(g, i);
  };
  return enqueue(stream, std::move(op)) == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                       : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace cudaemu

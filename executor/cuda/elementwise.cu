// Elementwise kernels over the functors of scalar_ops.h, Where and Cast.
#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"
#include "executor/scalar_ops.h"

namespace onnxddp::cuda {
namespace {

template <class T, class F>
__global__ void __launch_bounds__(kThreads) unary_kernel_of(const T* x, T* y, std::int64_t n, F f, bool vec) {
  std::int64_t done = 0;
  if (vec) {
    const std::int64_t vectors = n / kVec<T>;
    for (std::int64_t i = first_item(); i < vectors; i += item_step()) {
      Vec<T> v = load_vec(x + i * kVec<T>);
      ONNXDDP_UNROLL
      for (int j = 0; j < kVec<T>; ++j) v.v[j] = store<T>(f(load(v.v[j])));
      store_vec(y + i * kVec<T>, v);
    }
    done = vectors * kVec<T>;
  }
  for (std::int64_t i = done + first_item(); i < n; i += item_step()) y[i] = store<T>(f(load(x[i])));
}

template <class T, class F>
void launch_unary(const void* in, void* out, std::int64_t n, F f, cudaStream_t stream) {
  const T* x = static_cast<const T*>(in);
  T* y = static_cast<T*>(out);
  const bool vec = vector_aligned(x, y);
  launch("unary", unary_kernel_of<T, F>, grid_for(vec ? (n + kVec<T> - 1) / kVec<T> : n), dim3(kThreads), 0,
         stream, {reads(x, n), writes(y, n)}, x, y, n, f, vec);
}
template <class T, class F>
void run_unary(const void* x, void* y, std::int64_t n, double, double, cudaStream_t stream) {
  launch_unary<T>(x, y, n, F(), stream);
}
/// Clip and ClipMask: their limits in the compute type.
template <class T, template <class> class F>
void run_clip(const void* x, void* y, std::int64_t n, double min, double max, cudaStream_t stream) {
  using C = Compute<T>;
  launch_unary<T>(x, y, n, F<C>{static_cast<C>(min), static_cast<C>(max)}, stream);
}

/// kVec<T> consecutive elements, or one element kVec<T> times (stride 0).
template <class T>
__device__ inline Vec<T> load_operand(const T* p, std::int64_t stride) {
  if (stride != 0) return load_vec(p);
  Vec<T> v;
  const T one = *p;
  ONNXDDP_UNROLL
  for (int j = 0; j < kVec<T>; ++j) v.v[j] = one;
  return v;
}

/// `sa`, `sb`: inner strides of a and b, 0 or 1, for the vector path.
template <class In, class Out, class F>
__global__ void __launch_bounds__(kThreads) binary_kernel_of(Walk<3> walk, const In* a, const In* b, Out* y,
                                                             bool vec, std::int64_t sa, std::int64_t sb) {
  const F f{};
  std::int64_t done = 0, at[3];
  if (vec) {
    const std::int64_t vectors = walk.count / kVec<In>;
    for (std::int64_t i = first_item(); i < vectors; i += item_step()) {
      walk.at(i * kVec<In>, at);
      const Vec<In> va = load_operand(a + at[1], sa), vb = load_operand(b + at[2], sb);
      if constexpr (std::is_same_v<In, Out>) {
        Vec<Out> out;
        ONNXDDP_UNROLL
        for (int j = 0; j < kVec<In>; ++j) out.v[j] = store<Out>(f(load(va.v[j]), load(vb.v[j])));
        store_vec(y + at[0], out);
      } else {
        ONNXDDP_UNROLL
        for (int j = 0; j < kVec<In>; ++j) y[at[0] + j] = f(load(va.v[j]), load(vb.v[j]));
      }
    }
    done = vectors * kVec<In>;
  }
  for (std::int64_t i = done + first_item(); i < walk.count; i += item_step()) {
    walk.at(i, at);
    y[at[0]] = store<Out>(f(load(a[at[1]]), load(b[at[2]])));
  }
}

/// Whether operands [0, K) may be accessed `width` elements at a time: the output contiguous inside, inputs
/// contiguous or constant inside, rows that keep the alignment.
template <int K>
bool vectors_fit(const Walk<K>& walk, int width) {
  if (walk.rank > 1 && walk.size[0].divisor() % width != 0) return false;
  for (int k = 0; k < K; ++k) {
    const std::int64_t inner = walk.inner(k);
    if (inner != 1 && (inner != 0 || k == 0)) return false;
    for (int d = 1; inner == 1 && d < walk.rank; ++d)
      if (walk.stride[k][d] % width != 0) return false;
  }
  return true;
}

template <class In, class Out, class F>
void run_binary(const Walk<3>& walk, const void* left, const void* right, void* out, cudaStream_t stream) {
  const In* a = static_cast<const In*>(left);
  const In* b = static_cast<const In*>(right);
  Out* y = static_cast<Out*>(out);
  const std::int64_t sa = walk.inner(1), sb = walk.inner(2);
  const bool vec = vectors_fit(walk, kVec<In>) && (sa == 0 || vector_aligned(a)) &&
                   (sb == 0 || vector_aligned(b)) && (!std::is_same_v<In, Out> || vector_aligned(y));
  const std::int64_t items = vec ? (walk.count + kVec<In> - 1) / kVec<In> : walk.count;
  launch("binary", binary_kernel_of<In, Out, F>, grid_for(items), dim3(kThreads), 0, stream,
         {walk_writes(y, walk, 0), walk_reads(a, walk, 1), walk_reads(b, walk, 2)}, walk, a, b, y, vec, sa,
         sb);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    where_kernel(Walk<4> walk, const bool* condition, const T* a, const T* b, T* y, bool vec, std::int64_t sc,
                 std::int64_t sa, std::int64_t sb) {
  std::int64_t done = 0, at[4];
  if (vec) {
    const std::int64_t vectors = walk.count / kVec<T>;
    for (std::int64_t i = first_item(); i < vectors; i += item_step()) {
      walk.at(i * kVec<T>, at);
      Vec<T> va = load_operand(a + at[2], sa);
      const Vec<T> vb = load_operand(b + at[3], sb);
      ONNXDDP_UNROLL
      for (int j = 0; j < kVec<T>; ++j) va.v[j] = condition[at[1] + j * sc] ? va.v[j] : vb.v[j];
      store_vec(y + at[0], va);
    }
    done = vectors * kVec<T>;
  }
  for (std::int64_t i = done + first_item(); i < walk.count; i += item_step()) {
    walk.at(i, at);
    y[at[0]] = condition[at[1]] ? a[at[2]] : b[at[3]];
  }
}

template <class T>
void run_where(const Walk<4>& walk, const bool* condition, const void* left, const void* right, void* out,
               cudaStream_t stream) {
  const T* a = static_cast<const T*>(left);
  const T* b = static_cast<const T*>(right);
  T* y = static_cast<T*>(out);
  const std::int64_t sc = walk.inner(1), sa = walk.inner(2), sb = walk.inner(3);
  const bool vec = vectors_fit(walk, kVec<T>) && vector_aligned(y) && (sa == 0 || vector_aligned(a)) &&
                   (sb == 0 || vector_aligned(b));
  launch("where", where_kernel<T>, grid_for(vec ? (walk.count + kVec<T> - 1) / kVec<T> : walk.count),
         dim3(kThreads), 0, stream,
         {walk_writes(y, walk, 0), walk_reads(condition, walk, 1), walk_reads(a, walk, 2),
          walk_reads(b, walk, 3)},
         walk, condition, a, b, y, vec, sc, sa, sb);
}

// --- Cast ---

/// f32 to bf16 and back: the casts of every training step.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) convert_kernel(const From* x, To* y, std::int64_t n, bool vec) {
  constexpr int kWidth = kVec<bf16>;
  std::int64_t done = 0;
  if (vec) {
    const std::int64_t vectors = n / kWidth;
    for (std::int64_t i = first_item(); i < vectors; i += item_step()) {
      float value[kWidth];
      ONNXDDP_UNROLL
      for (int part = 0; part < kWidth; part += kVec<From>) {
        const Vec<From> v = load_vec(x + i * kWidth + part);
        ONNXDDP_UNROLL
        for (int j = 0; j < kVec<From>; ++j) value[part + j] = load(v.v[j]);
      }
      ONNXDDP_UNROLL
      for (int part = 0; part < kWidth; part += kVec<To>) {
        Vec<To> v;
        ONNXDDP_UNROLL
        for (int j = 0; j < kVec<To>; ++j) v.v[j] = store<To>(value[part + j]);
        store_vec(y + i * kWidth + part, v);
      }
    }
    done = vectors * kWidth;
  }
  for (std::int64_t i = done + first_item(); i < n; i += item_step()) y[i] = store<To>(load(x[i]));
}

template <class From, class To>
void convert(const void* in, void* out, std::int64_t n, cudaStream_t stream) {
  const From* x = static_cast<const From*>(in);
  To* y = static_cast<To*>(out);
  const bool vec = vector_aligned(x, y);
  launch("convert", convert_kernel<From, To>, grid_for(vec ? (n + 7) / 8 : n), dim3(kThreads), 0, stream,
         {reads(x, n), writes(y, n)}, x, y, n, vec);
}

/// A number on its way from one dtype to another: floats as double, integers and bool as i64; both hold every
/// source exactly.
struct Number {
  double real;
  std::int64_t whole;
  bool is_real;
};
template <class T>
__device__ inline Number number(const void* x, std::int64_t i) {
  const T value = static_cast<const T*>(x)[i];
  if constexpr (std::is_integral_v<T>)
    return {0.0, static_cast<std::int64_t>(value), false};
  else
    return {static_cast<double>(load(value)), 0, true};
}
__device__ inline Number read_number(const void* x, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f32: return number<float>(x, i);
    case DType::bf16: return number<bf16>(x, i);
    case DType::f64: return number<double>(x, i);
    case DType::i64: return number<std::int64_t>(x, i);
    case DType::i32: return number<std::int32_t>(x, i);
    case DType::i16: return number<std::int16_t>(x, i);
    case DType::i8: return number<std::int8_t>(x, i);
    case DType::u8: return number<std::uint8_t>(x, i);
    default: return number<bool>(x, i);
  }
}
/// Float to integer: towards zero, limits where it does not fit, 0 for NaN. Integer to integer: the low bits.
template <class T>
__device__ inline T to_integer(const Number& x, double low, double high, T least, T most) {
  if (!x.is_real) return static_cast<T>(x.whole);
  if (!(x.real == x.real)) return 0;
  if (x.real <= low) return least;
  return x.real >= high ? most : static_cast<T>(x.real);
}
__device__ inline void write_number(void* y, DType dtype, std::int64_t i, const Number& x) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(y)[i] = x.is_real ? static_cast<float>(x.real) : static_cast<float>(x.whole);
      break;
    case DType::bf16:
      static_cast<bf16*>(y)[i] =
          __float2bfloat16(x.is_real ? static_cast<float>(x.real) : static_cast<float>(x.whole));
      break;
    case DType::f64: static_cast<double*>(y)[i] = x.is_real ? x.real : static_cast<double>(x.whole); break;
    case DType::i64:
      static_cast<std::int64_t*>(y)[i] =
          to_integer<std::int64_t>(x, -9223372036854775808.0, 9223372036854775808.0, INT64_MIN, INT64_MAX);
      break;
    case DType::i32:
      static_cast<std::int32_t*>(y)[i] =
          to_integer<std::int32_t>(x, -2147483648.0, 2147483647.0, INT32_MIN, INT32_MAX);
      break;
    case DType::i16:
      static_cast<std::int16_t*>(y)[i] = to_integer<std::int16_t>(x, -32768.0, 32767.0, INT16_MIN, INT16_MAX);
      break;
    case DType::i8:
      static_cast<std::int8_t*>(y)[i] = to_integer<std::int8_t>(x, -128.0, 127.0, INT8_MIN, INT8_MAX);
      break;
    case DType::u8:
      static_cast<std::uint8_t*>(y)[i] = to_integer<std::uint8_t>(x, 0.0, 255.0, 0, UINT8_MAX);
      break;
    default: static_cast<bool*>(y)[i] = x.is_real ? x.real != 0.0 : x.whole != 0;
  }
}
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const void* x, DType from, void* y, DType to, std::int64_t n) {
  for (std::int64_t i = first_item(); i < n; i += item_step())
    write_number(y, to, i, read_number(x, from, i));
}

/// Bytes of an element that Cast knows, else an error.
std::int64_t cast_width(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::i16: return 2;
    case DType::i8:
    case DType::u8:
    case DType::boolean: return 1;
    default: unsupported("Cast", dtype);
  }
}

struct UnaryEntry {
  std::string_view op;
  DType dtype;
  UnaryKernel kernel;
};
struct BinaryEntry {
  std::string_view op;
  DType dtype;
  BinaryKernel kernel;
};

const UnaryEntry kUnary[] = {
#define ONNXDDP_ENTRY(NAME) \
  {#NAME, DType::f32, run_unary<float, scalar::NAME>}, {#NAME, DType::bf16, run_unary<bf16, scalar::NAME>},
    ONNXDDP_UNARY_FLOAT_OPS(ONNXDDP_ENTRY) ONNXDDP_UNARY_OPS(ONNXDDP_ENTRY)
#undef ONNXDDP_ENTRY
#define ONNXDDP_ENTRY(NAME)                                   \
  {#NAME, DType::i64, run_unary<std::int64_t, scalar::NAME>}, \
      {#NAME, DType::i32, run_unary<std::int32_t, scalar::NAME>},
        ONNXDDP_UNARY_OPS(ONNXDDP_ENTRY)
#undef ONNXDDP_ENTRY
            {"Clip", DType::f32, run_clip<float, scalar::Clip>},
    {"Clip", DType::bf16, run_clip<bf16, scalar::Clip>},
    {"ClipMask", DType::f32, run_clip<float, scalar::ClipMask>},
    {"ClipMask", DType::bf16, run_clip<bf16, scalar::ClipMask>},
    {"Not", DType::boolean, run_unary<bool, scalar::Not>}};

const BinaryEntry kBinary[] = {
#define ONNXDDP_ENTRY(NAME)                                    \
  {#NAME, DType::f32, run_binary<float, float, scalar::NAME>}, \
      {#NAME, DType::bf16, run_binary<bf16, bf16, scalar::NAME>},
    ONNXDDP_BINARY_OPS(ONNXDDP_ENTRY) ONNXDDP_BINARY_FLOAT_OPS(ONNXDDP_ENTRY)
#undef ONNXDDP_ENTRY
#define ONNXDDP_ENTRY(NAME)                                                  \
  {#NAME, DType::i64, run_binary<std::int64_t, std::int64_t, scalar::NAME>}, \
      {#NAME, DType::i32, run_binary<std::int32_t, std::int32_t, scalar::NAME>},
        ONNXDDP_BINARY_OPS(ONNXDDP_ENTRY)
#undef ONNXDDP_ENTRY
#define ONNXDDP_ENTRY(NAME)                                              \
  {#NAME, DType::f32, run_binary<float, bool, scalar::NAME>},            \
      {#NAME, DType::bf16, run_binary<bf16, bool, scalar::NAME>},        \
      {#NAME, DType::i64, run_binary<std::int64_t, bool, scalar::NAME>}, \
      {#NAME, DType::i32, run_binary<std::int32_t, bool, scalar::NAME>}, \
      {#NAME, DType::boolean, run_binary<bool, bool, scalar::NAME>},
            ONNXDDP_COMPARE_OPS(ONNXDDP_ENTRY)
#undef ONNXDDP_ENTRY
#define ONNXDDP_ENTRY(NAME) {#NAME, DType::boolean, run_binary<bool, bool, scalar::NAME>},
                ONNXDDP_LOGIC_OPS(ONNXDDP_ENTRY)
#undef ONNXDDP_ENTRY
};

}  // namespace

UnaryKernel unary_kernel(std::string_view op, DType dtype) {
  for (const UnaryEntry& entry : kUnary)
    if (entry.op == op && entry.dtype == dtype) return entry.kernel;
  return nullptr;
}

BinaryKernel binary_kernel(std::string_view op, DType dtype) {
  for (const BinaryEntry& entry : kBinary)
    if (entry.op == op && entry.dtype == dtype) return entry.kernel;
  return nullptr;
}

void where(const Walk<4>& walk, const bool* condition, const void* a, const void* b, void* y,
           std::size_t width, cudaStream_t stream) {
  switch (width) {
    case 1: return run_where<std::uint8_t>(walk, condition, a, b, y, stream);
    case 2: return run_where<std::uint16_t>(walk, condition, a, b, y, stream);
    case 4: return run_where<std::uint32_t>(walk, condition, a, b, y, stream);
    default: return run_where<std::uint64_t>(walk, condition, a, b, y, stream);
  }
}

void cast(const void* x, DType from, void* y, DType to, std::int64_t n, cudaStream_t stream) {
  if (from == DType::f32 && to == DType::bf16) return convert<float, bf16>(x, y, n, stream);
  if (from == DType::bf16 && to == DType::f32) return convert<bf16, float>(x, y, n, stream);
  launch("cast", cast_kernel, grid_for(n), dim3(kThreads), 0, stream,
         {reads(static_cast<const char*>(x), n * cast_width(from)),
          writes(static_cast<char*>(y), n * cast_width(to))},
         x, from, y, to, n);
}

}  // namespace onnxddp::cuda

// The launch layer: how kernels are written and started. One .cu file is compiled twice: by nvcc for the
// device, and by g++ (-x c++ -DONNXDDP_CUDA_EMU) for the emulator of tests/cudaemu. This is the only file
// that knows of both.
//
//   #include "executor/cuda/launch.h"
//   namespace onnxddp {
//   // One block a row.
//   __global__ void row_mean_kernel(const float* x, float* y, int cols) {
//     float total = 0;
//     for (int i = threadIdx.x; i < cols; i += blockDim.x) total += x[int64_t{blockIdx.x} * cols + i];
//     total = block_sum(total);            // every thread gets the sum
//     ONNXDDP_SHARED(float, scale, [1]);   // __shared__ float scale[1];
//     if (threadIdx.x == 0) scale[0] = 1.0f / static_cast<float>(cols);
//     __syncthreads();
//     if (threadIdx.x == 0) y[blockIdx.x] = total * scale[0];
//   }
//   void row_mean(const float* x, float* y, int rows, int cols, cudaStream_t stream) {
//     launch("row_mean", row_mean_kernel, dim3(rows), dim3(256), 0, stream,
//            {reads(x, int64_t{rows} * cols), writes(y, rows)}, x, y, cols);
//   }
//   }  // namespace onnxddp
//
// Rules for kernels:
// - Declare every byte that a kernel may touch: reads(p, n), writes(p, n) (written, old values not read),
//   updates(p, n) (read and written). n counts elements. The emulator checks races, uninitialised reads and
//   freed memory from these ranges, faults on undeclared buffers, and reports a pointer argument that no
//   range covers. For pointers inside a device table pass a std::vector<Range> in place of the braces.
// - Shared arrays: ONNXDDP_SHARED(type, name, [n]...), or ONNXDDP_DYNAMIC_SHARED(type, name) for the
//   launch's shared_bytes (one type a kernel; pass shared_bytes = n * sizeof(type)). Use them by index and
//   `auto` only: under emulation an element is a checked wrapper (a missing barrier or an unwritten element
//   is a report), so copy it to a local before calling members or templates on it: `float v = name[i];`.
// - Block reductions need a one-dimensional block whose size is a multiple of 32. All threads must call them.
// - 128-bit accesses only through load_vec/store_vec, after vector_aligned() said yes on the host.
// - On both sides exist: <cmath>, min, max, rsqrtf, __ldg, __umulhi, __popc, __ffs, __clz, __float_as_uint,
//   __uint_as_float, atomicAdd/Max/Min/Or/CAS/Exch, __shfl_*_sync, __ballot_sync, __any_sync, __all_sync,
//   __syncwarp, __syncthreads(_or/_and/_count), __threadfence. No __device__ or __constant__ variables, no
//   printf.
// - An empty tensor needs no special case: a grid without blocks starts nothing.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <vector>

#if defined(ONNXDDP_CUDA_EMU)
#include "tests/cudaemu/device.h"
#endif

namespace onnxddp {

/// A range of device memory that a launch touches, in bytes.
struct Range {
  const void* data = nullptr;
  size_t bytes = 0;
  bool read = false;
  bool write = false;
};

/// The kernel reads n elements from p on.
template <class T>
Range reads(const T* p, int64_t n) {
  return {p, static_cast<size_t>(n) * sizeof(T), true, false};
}
/// The kernel writes (some of) n elements from p on and does not read the old ones.
template <class T>
Range writes(T* p, int64_t n) {
  static_assert(!std::is_const_v<T>, "writes() needs a pointer to mutable elements");
  return {p, static_cast<size_t>(n) * sizeof(T), false, true};
}
/// The kernel reads and writes n elements from p on.
template <class T>
Range updates(T* p, int64_t n) {
  static_assert(!std::is_const_v<T>, "updates() needs a pointer to mutable elements");
  return {p, static_cast<size_t>(n) * sizeof(T), true, true};
}

/// The ranges of one launch: a braced list or a vector, which must outlive the call of launch() only.
class Ranges {
 public:
  Ranges(std::initializer_list<Range> list) : Ranges(list.begin(), list.size()) {}  // NOLINT: implicit
  Ranges(const std::vector<Range>& list) : Ranges(list.data(), list.size()) {}      // NOLINT: implicit
  const Range* begin() const { return begin_; }
  const Range* end() const { return begin_ + size_; }

 private:
  Ranges(const Range* first, size_t size) : begin_(first), size_(size) {}
  const Range* begin_;
  size_t size_;
};

/// Throws an InternalError that names the kernel and the CUDA error; a launch fails only by a bug.
/// (launch.cpp)
[[noreturn]] void launch_failed(const char* kernel, cudaError_t error);

/// The error of a launch unless it is success; sticky errors of earlier work show here, too.
inline void check_launch(const char* kernel, cudaError_t error) {
  if (error != cudaSuccess) launch_failed(kernel, error);
}

/// Shared memory that a block gets without asking for it (cudaFuncSetAttribute), in bytes.
inline constexpr size_t kDefaultSharedBytes = 48 * 1024;
/// Threads of a warp.
inline constexpr int kWarp = 32;

/// Blocks of `threads` that cover n elements, at least 0 and at most `limit` (kernels then stride over the
/// grid).
inline unsigned blocks_for(int64_t n, int threads, unsigned limit = 65535) {
  const int64_t blocks = (n + threads - 1) / threads;
  return blocks > static_cast<int64_t>(limit) ? limit : static_cast<unsigned>(blocks);
}

#if defined(__CUDACC__) || defined(ONNXDDP_CUDA_EMU)

/// Starts kernel(args...) on the stream. shared_bytes: dynamic shared memory of a block; above 48 KiB it is
/// asked for by itself (up to 227 KiB on Hopper). ranges: see the top of the file. A grid without blocks
/// starts nothing. Throws InternalError if CUDA refuses the launch.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, const Ranges& ranges, A... args) {
  static_assert(sizeof...(P) == sizeof...(A), "launch: as many arguments as the kernel has parameters");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > kDefaultSharedBytes)
    check_launch(name, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes)));
#if defined(ONNXDDP_CUDA_EMU)
  std::vector<cudaemu::Access> touched;
  for (const Range& r : ranges) touched.push_back({r.data, r.bytes, r.read, r.write});
  cudaemu::launch(name, kernel, grid, block, shared_bytes, stream, std::move(touched),
                  static_cast<P>(args)...);
#else
  (void)ranges;
  // The formatter would split the closing brackets.
  // clang-format off
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<P>(args)...);
  // clang-format on
#endif
  check_launch(name, cudaGetLastError());
}

#if defined(ONNXDDP_CUDA_EMU)
#define ONNXDDP_SHARED(type, name, extent)                 \
  static ::cudaemu::SharedArray<type extent> name##_array; \
  auto& name = name##_array.get()
#define ONNXDDP_DYNAMIC_SHARED(type, name) auto name = ::cudaemu::dynamic_shared<type>()
#define ONNXDDP_CHECK_ALIGNED(p) ::cudaemu::check_alignment(p, 16)
#else
/// A static shared array, `ONNXDDP_SHARED(float, tile, [32][33]);`.
#define ONNXDDP_SHARED(type, name, extent) __shared__ type name extent
/// The dynamic shared memory of the launch as `type* name`.
#define ONNXDDP_DYNAMIC_SHARED(type, name)                    \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  type* name = reinterpret_cast<type*>(name##_raw)
#define ONNXDDP_CHECK_ALIGNED(p) ((void)0)
#endif

#endif  // kernels

// 128-bit accesses.

/// Elements of one 128-bit access.
template <class T>
inline constexpr int kVec = static_cast<int>(16 / sizeof(T));

/// 16 bytes of T in registers.
template <class T>
struct alignas(16) Vec {
  T v[kVec<T>];
};

/// True if all pointers are 16-byte aligned, so that load_vec and store_vec may be used from there on.
template <class... T>
bool vector_aligned(const T*... p) {
  return ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

#if defined(__CUDACC__) || defined(ONNXDDP_CUDA_EMU)

/// Reads 16 bytes; p must be 16-byte aligned (else a fault, on the device and under emulation).
template <class T>
__device__ inline Vec<T> load_vec(const T* p) {
  ONNXDDP_CHECK_ALIGNED(p);
  return *reinterpret_cast<const Vec<T>*>(p);
}
/// Writes 16 bytes; p must be 16-byte aligned.
template <class T>
__device__ inline void store_vec(T* p, const Vec<T>& value) {
  ONNXDDP_CHECK_ALIGNED(p);
  *reinterpret_cast<Vec<T>*>(p) = value;
}

/// float of a stored element, and back (bf16 rounds to nearest even).
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(x);
  else
    return static_cast<T>(x);
}

// Reductions. Op is a functor with `T operator()(T a, T b) const`, associative and commutative. The order of
// the combination depends on the block size only: results are the same bits in every run.

struct SumOp {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct MaxOp {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b || a != a ? a : b;  // a NaN wins on either side: if b is NaN, both comparisons fail
  }
};
struct MinOp {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

/// Combines the values of the 32 threads of a warp; every thread gets the result. All 32 must call it.
template <class T, class Op>
__device__ inline T warp_reduce(T value, Op op) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

/// Combines the values of all threads of a block; every thread gets the result. identity: op(identity, x) ==
/// x. T: a type that __shfl_xor_sync takes (32 or 64 bits).
template <class T, class Op>
__device__ inline T block_reduce(T value, T identity, Op op) {
  ONNXDDP_SHARED(T, partial, [kWarp]);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  value = warp_reduce(value, op);
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  value = identity;
  if (lane < warps) value = partial[lane];
  value = warp_reduce(value, op);
  __syncthreads();  // the next reduction of this block may write `partial` at once
  return value;
}

template <class T>
__device__ inline T block_sum(T value) {
  return block_reduce(value, T{0}, SumOp{});
}
__device__ inline float block_max(float value) { return block_reduce(value, -INFINITY, MaxOp{}); }
__device__ inline float block_min(float value) { return block_reduce(value, INFINITY, MinOp{}); }

#endif  // kernels

}  // namespace onnxddp

// Device side of the emulator: what a kernel sees when g++ compiles it. Included by executor/cuda/launch.h
// only. All state here belongs to the one thread that runs the scheduler, under the emulator's lock.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cudaemu {

/// A range of memory that an operation touches.
struct Access {
  const void* data;
  size_t bytes;
  bool read, write;
};

struct Index3 {
  unsigned x, y, z;
};
extern Index3 thread_index, block_index, block_size, grid_size;

/// Queues a kernel. `body` runs one thread of it; `pointers` are its pointer arguments (checked against
/// `touched`).
void launch_kernel(const char* name, const void* function, dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, std::vector<Access> touched, const std::vector<const void*>& pointers,
                   std::function<void()> body);

template <class T>
void collect_pointer(std::vector<const void*>& out, const T& value) {
  if constexpr (std::is_pointer_v<T>) out.push_back(static_cast<const void*>(value));
}

template <class... P>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, std::vector<Access> touched, std::type_identity_t<P>... args) {
  std::vector<const void*> pointers;
  (collect_pointer(pointers, args), ...);
  launch_kernel(name, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream,
                std::move(touched), pointers,
                [kernel, packed = std::tuple<std::decay_t<P>...>(args...)] { std::apply(kernel, packed); });
}

// --- rendezvous of threads (fiber.cpp) ---

inline constexpr int kWarpSize = 32;
enum class Vote { kNone, kAnd, kOr, kCount };
/// Waits for all living threads of the block; returns the vote over `predicate`. Threads that meet at
/// different source lines are a report (a barrier in divergent code).
int block_barrier(Vote vote, bool predicate, const char* file, int line);
/// Waits for the living lanes of `mask` in this warp; out gets the bytes of lane `source` (poison if it takes
/// no part).
void warp_exchange(unsigned mask, const void* in, void* out, size_t bytes, int source);
/// Waits as warp_exchange; one bit for each lane of the mask whose predicate holds.
unsigned warp_ballot(unsigned mask, bool predicate);
int lane_of_thread();

// --- shared memory with a checker of its own (fiber.cpp) ---

/// Who runs now, in the terms of the checker.
struct Now {
  uint64_t block = 1;       ///< serial number of the running block, never reused
  int thread = 0;           ///< linear index in the block
  uint32_t phase = 0;       ///< block barriers passed
  uint32_t warp_phase = 0;  ///< warp rendezvous passed by this thread
};
extern Now now;

/// Reports a misuse of shared memory in the running kernel (once a launch).
void shared_report(const char* what, int other_thread);
/// Bytes that live until the block ends. `declared` bytes count towards the 48 KiB of static shared memory.
void* allocate_shared(size_t bytes, size_t declared);
/// The dynamic shared memory of the running launch, widened for elements of `element` bytes that stand for
/// `bytes`.
void* dynamic_shared_memory(size_t bytes, size_t element, size_t* count);

/// Last accesses to one element, enough to tell a missing barrier in any order of the threads.
struct Shadow {
  uint64_t block;
  uint32_t write_phase, write_warp_phase, read_phase, read_warp_phase;
  int16_t writer, reader, reader_warp;  // -1 none; reader -2: several (reader_warp -1: of several warps)
  bool atomic;

  bool open() {
    if (block == now.block) return true;
    *this = {now.block, 0, 0, 0, 0, -1, -1, -1, false};
    return false;
  }
  bool after_write() const {
    return writer < 0 || writer == now.thread || write_phase != now.phase ||
           (writer / 32 == now.thread / 32 && write_warp_phase < now.warp_phase);
  }
  bool after_reads() const {
    return reader == -1 || reader == now.thread || read_phase != now.phase ||
           (reader_warp == now.thread / 32 && read_warp_phase < now.warp_phase);
  }
  void on_read() {
    if (!open() || writer < 0) shared_report("reads shared memory that no thread of the block wrote", -1);
    if (!after_write()) shared_report("reads shared memory without a barrier after the write", writer);
    const auto warp = static_cast<int16_t>(now.thread / 32);
    if (reader != -1 && read_phase == now.phase && reader != now.thread) {
      reader = -2;
      if (reader_warp != warp) reader_warp = -1;
    } else if (reader != now.thread || read_phase != now.phase) {
      reader = static_cast<int16_t>(now.thread);
      reader_warp = warp;
    }
    read_phase = now.phase;
    read_warp_phase = now.warp_phase;
  }
  void on_write(bool is_atomic) {
    open();
    if (!after_write() && !(atomic && is_atomic))
      shared_report("writes shared memory that another thread writes, without a barrier", writer);
    if (!after_reads()) shared_report("overwrites shared memory without a barrier after the read", reader);
    writer = static_cast<int16_t>(now.thread);
    write_phase = now.phase;
    write_warp_phase = now.warp_phase;
    atomic = is_atomic;
  }
};

/// One element of shared memory. Reads and writes as a T.
template <class T>
class Element {
 public:
  operator T() const {  // NOLINT: implicit on purpose
    shadow_.on_read();
    return value_;
  }
  Element& operator=(T value) {
    shadow_.on_write(false);
    value_ = value;
    return *this;
  }
  Element& operator=(const Element& other) { return *this = static_cast<T>(other); }
  Element& operator+=(T value) { return *this = static_cast<T>(static_cast<T>(*this) + value); }
  Element& operator-=(T value) { return *this = static_cast<T>(static_cast<T>(*this) - value); }
  Element& operator*=(T value) { return *this = static_cast<T>(static_cast<T>(*this) * value); }
  Element& operator++() { return *this += T{1}; }

  template <class F>
  T atomic_update(F&& next) {
    if (!shadow_.open() || shadow_.writer < 0) shadow_.on_read();
    const T old = value_;
    shadow_.on_write(true);
    value_ = next(old);
    return old;
  }

 private:
  mutable Shadow shadow_;
  T value_;
};

template <class A>
struct ElementArray {
  using type = Element<A>;
};
template <class A, size_t N>
struct ElementArray<A[N]> {
  using type = typename ElementArray<A>::type[N];
};

/// A static shared array; the first thread of a block that comes here allocates it.
template <class A>
class SharedArray {
 public:
  using Elements = typename ElementArray<A>::type;
  Elements& get() {
    if (block_ != now.block) {
      elements_ = static_cast<Elements*>(allocate_shared(sizeof(Elements), sizeof(A)));
      block_ = now.block;
    }
    return *elements_;
  }

 private:
  uint64_t block_ = 0;
  Elements* elements_ = nullptr;
};

/// Dynamic shared memory; stands for `T*` and checks its bounds.
template <class T>
class SharedSpan {
 public:
  SharedSpan(Element<T>* data, size_t size) : data_(data), size_(size) {}
  Element<T>& operator[](size_t i) const {
    if (i >= size_) {
      shared_report("indexes dynamic shared memory out of bounds", -1);
      i = 0;
    }
    return data_[i];
  }
  SharedSpan operator+(size_t n) const {
    return n <= size_ ? SharedSpan(data_ + n, size_ - n) : SharedSpan(data_, 0);
  }
  Element<T>& operator*() const { return (*this)[0]; }

 private:
  Element<T>* data_;
  size_t size_;
};

template <class T>
SharedSpan<T> dynamic_shared() {
  size_t count = 0;
  void* data = dynamic_shared_memory(sizeof(T), sizeof(Element<T>), &count);
  return SharedSpan<T>(static_cast<Element<T>*>(data), count);
}

/// Ends the process if the pointer is not `alignment`-aligned, as the device would.
void check_alignment(const void* p, size_t alignment);

template <class T, class F>
T atomic_update(T* p, F&& next) {
  const T old = *p;
  *p = next(old);
  return old;
}
template <class T, class F>
T atomic_update(Element<T>* p, F&& next) {
  return p->atomic_update(std::forward<F>(next));
}
template <class T>
struct ValueOf {
  using type = T;
};
template <class T>
struct ValueOf<Element<T>> {
  using type = T;
};
template <class T>
using Value = typename ValueOf<T>::type;

}  // namespace cudaemu

#define threadIdx ::cudaemu::thread_index
#define blockIdx ::cudaemu::block_index
#define blockDim ::cudaemu::block_size
#define gridDim ::cudaemu::grid_size
inline constexpr int warpSize = ::cudaemu::kWarpSize;
#undef __launch_bounds__
#define __launch_bounds__(...)

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  ::cudaemu::block_barrier(::cudaemu::Vote::kNone, false, file, line);
}
inline int __syncthreads_and(int p, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return ::cudaemu::block_barrier(::cudaemu::Vote::kAnd, p != 0, file, line);
}
inline int __syncthreads_or(int p, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return ::cudaemu::block_barrier(::cudaemu::Vote::kOr, p != 0, file, line);
}
inline int __syncthreads_count(int p, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return ::cudaemu::block_barrier(::cudaemu::Vote::kCount, p != 0, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { ::cudaemu::warp_ballot(mask, false); }
inline unsigned __ballot_sync(unsigned mask, int p) { return ::cudaemu::warp_ballot(mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return ::cudaemu::warp_ballot(mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return ::cudaemu::warp_ballot(mask, p == 0) == 0; }
inline void __threadfence() {}
inline void __threadfence_block() {}

/// Shuffles inside segments of `width` lanes; a source outside the segment means the thread's own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  T out;
  const int base = ::cudaemu::lane_of_thread() / width * width;
  ::cudaemu::warp_exchange(mask, &value, &out, sizeof(T), base + (lane & (width - 1)));
  return out;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  T out;
  const int lane = ::cudaemu::lane_of_thread(), source = lane ^ lane_mask;
  ::cudaemu::warp_exchange(mask, &value, &out, sizeof(T), source / width <= lane / width ? source : lane);
  return out;
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  T out;
  const int lane = ::cudaemu::lane_of_thread(), source = lane + static_cast<int>(delta);
  ::cudaemu::warp_exchange(mask, &value, &out, sizeof(T), source / width == lane / width ? source : lane);
  return out;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  T out;
  const int lane = ::cudaemu::lane_of_thread(), source = lane - static_cast<int>(delta);
  ::cudaemu::warp_exchange(mask, &value, &out, sizeof(T), source >= lane / width * width ? source : lane);
  return out;
}

template <class P>
::cudaemu::Value<P> atomicAdd(P* p, ::cudaemu::Value<P> v) {
  return ::cudaemu::atomic_update(p, [v](auto old) { return static_cast<decltype(old)>(old + v); });
}
template <class P>
::cudaemu::Value<P> atomicMax(P* p, ::cudaemu::Value<P> v) {
  return ::cudaemu::atomic_update(p, [v](auto old) { return old > v ? old : v; });
}
template <class P>
::cudaemu::Value<P> atomicMin(P* p, ::cudaemu::Value<P> v) {
  return ::cudaemu::atomic_update(p, [v](auto old) { return old < v ? old : v; });
}
template <class P>
::cudaemu::Value<P> atomicOr(P* p, ::cudaemu::Value<P> v) {
  return ::cudaemu::atomic_update(p, [v](auto old) { return static_cast<decltype(old)>(old | v); });
}
template <class P>
::cudaemu::Value<P> atomicExch(P* p, ::cudaemu::Value<P> v) {
  return ::cudaemu::atomic_update(p, [v](auto) { return v; });
}
template <class P>
::cudaemu::Value<P> atomicCAS(P* p, ::cudaemu::Value<P> expected, ::cudaemu::Value<P> v) {
  return ::cudaemu::atomic_update(p, [expected, v](auto old) { return old == expected ? v : old; });
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline unsigned __float_as_uint(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __uint_as_float(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float __int_as_float(int i) { return __uint_as_float(static_cast<unsigned>(i)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

#define ONNXDDP_EMU_MINMAX(T)                         \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
ONNXDDP_EMU_MINMAX(int)
ONNXDDP_EMU_MINMAX(unsigned)
ONNXDDP_EMU_MINMAX(long)
ONNXDDP_EMU_MINMAX(unsigned long)
ONNXDDP_EMU_MINMAX(long long)
ONNXDDP_EMU_MINMAX(unsigned long long)
#undef ONNXDDP_EMU_MINMAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

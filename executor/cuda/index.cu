// Gather, and its gradient by a stable sort: rows of one index are added in their order, without atomics.
#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {
namespace {

/// Index i, negative ones counted from the end; -1 if it is out of range (`report`: and it goes to fault).
__device__ inline std::int64_t index_at(const void* indices, bool wide, std::int64_t i, std::int64_t size,
                                        bool report, FaultWord* fault) {
  const std::int64_t raw =
      wide ? static_cast<const std::int64_t*>(indices)[i] : static_cast<const std::int32_t*>(indices)[i];
  const std::int64_t k = raw < 0 ? raw + size : raw;
  if (k >= 0 && k < size) return k;
  if (report && fault != nullptr) atomicMin(fault, fault_word(i, raw));
  return -1;
}

Range index_range(const void* indices, bool wide, std::int64_t n) {
  return reads(static_cast<const char*>(indices), n * (wide ? 8 : 4));
}
Range fault_range(FaultWord* fault) { return updates(fault, fault == nullptr ? 0 : 1); }

template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(std::int64_t size, Divider inner, Divider count, const T* x, const void* indices, bool wide,
                  T* y, std::int64_t n, FaultWord* fault) {
  for (std::int64_t i = first_item(); i < n; i += item_step()) {
    std::int64_t outer = i;
    const std::int64_t j = inner.split(outer), position = count.split(outer);
    const std::int64_t k = index_at(indices, wide, position, size, j == 0, fault);
    T value{};
    if (k >= 0) value = x[(outer * size + k) * inner.divisor() + j];
    if constexpr (sizeof(T) == 16)
      store_vec(reinterpret_cast<std::uint32_t*>(y + i), value);
    else
      y[i] = value;
  }
}

template <class T>
void run_gather(const Table& t, std::int64_t inner, const void* in, const void* indices, bool wide, void* out,
                FaultWord* fault, cudaStream_t stream) {
  const T* x = static_cast<const T*>(in);
  T* y = static_cast<T*>(out);
  const std::int64_t n = t.outer * t.count * inner;
  launch("gather", gather_kernel<T>, grid_for(n), dim3(kThreads), 0, stream,
         {reads(x, t.outer * t.size * inner), index_range(indices, wide, t.count), writes(y, n),
          fault_range(fault)},
         t.size, Divider(inner), Divider(t.count), x, indices, wide, y, n, fault);
}

// --- the gradient ---

constexpr int kSortThreads = 512, kDigitBits = 4, kDigits = 1 << kDigitBits;

/// keys[i] = index of row i (size where it is out of range), order[i] = i.
__global__ void __launch_bounds__(kThreads)
    keys_kernel(const void* indices, bool wide, std::int64_t n, std::int64_t size, std::uint32_t* keys,
                std::uint32_t* order, FaultWord* fault) {
  for (std::int64_t i = first_item(); i < n; i += item_step()) {
    const std::int64_t k = index_at(indices, wide, i, size, true, fault);
    keys[i] = static_cast<std::uint32_t>(k < 0 ? size : k);
    order[i] = static_cast<std::uint32_t>(i);
  }
}

/// One pass of a stable radix sort by one block. Thread t owns a run of rows; counts[digit][thread] are
/// summed up, and become the place of the thread's next row with that digit.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const std::uint32_t* keys, const std::uint32_t* order, std::uint32_t* sorted_keys,
                std::uint32_t* sorted_order, std::int64_t n, int shift) {
  ONNXDDP_SHARED(std::uint32_t, counts, [kDigits * kSortThreads]);
  ONNXDDP_SHARED(std::uint32_t, warp_sums, [kSortThreads / kWarp]);
  const int t = static_cast<int>(threadIdx.x);
  const std::int64_t begin = n * t / kSortThreads, end = n * (t + 1) / kSortThreads;
  for (int d = 0; d < kDigits; ++d) counts[d * kSortThreads + t] = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const int cell = static_cast<int>((keys[i] >> shift) & (kDigits - 1)) * kSortThreads + t;
    const std::uint32_t before = counts[cell];
    counts[cell] = before + 1;
  }
  __syncthreads();
  std::uint32_t sum = 0;  // of kDigits counters in a row, then of all before them
  for (int j = 0; j < kDigits; ++j) sum += counts[t * kDigits + j];
  std::uint32_t inclusive = sum;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const std::uint32_t left = __shfl_up_sync(0xffffffffu, inclusive, static_cast<unsigned>(offset));
    if (t % kWarp >= offset) inclusive += left;
  }
  if (t % kWarp == kWarp - 1) warp_sums[t / kWarp] = inclusive;
  __syncthreads();
  std::uint32_t place = inclusive - sum;
  for (int w = 0; w < t / kWarp; ++w) place += warp_sums[w];
  for (int j = 0; j < kDigits; ++j) {
    const std::uint32_t own = counts[t * kDigits + j];
    counts[t * kDigits + j] = place;
    place += own;
  }
  __syncthreads();
  for (std::int64_t i = begin; i < end; ++i) {
    const std::uint32_t key = keys[i];
    const int cell = static_cast<int>((key >> shift) & (kDigits - 1)) * kSortThreads + t;
    const std::uint32_t to = counts[cell];
    counts[cell] = to + 1;
    sorted_keys[to] = key;
    sorted_order[to] = order[i];
  }
}

/// A block takes one sorted position, and works if a new index begins there: it adds the index's rows in
/// order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_rows_kernel(const std::uint32_t* keys, const std::uint32_t* order, std::int64_t n, std::int64_t size,
                    std::int64_t outers, std::int64_t inner, const T* dy, T* dx) {
  const std::int64_t first = blockIdx.x;
  const std::uint32_t key = keys[first];
  if (static_cast<std::int64_t>(key) >= size || (first > 0 && keys[first - 1] == key)) return;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x; i < outers * inner; i += step) {
    const std::int64_t outer = i / inner, j = i % inner;
    float sum = 0;
    for (std::int64_t r = first; r < n && keys[r] == key; ++r)
      sum += load(dy[(outer * n + static_cast<std::int64_t>(order[r])) * inner + j]);
    dx[(outer * size + key) * inner + j] = store<T>(sum);
  }
}

/// Bytes of one of the four arrays of sort_kernel in the scratch memory.
std::int64_t sort_words(const Table& t) { return (t.count + 3) / 4 * 4; }

}  // namespace

void gather(const Table& t, std::size_t width, const void* x, const void* indices, bool wide, void* y,
            FaultWord* fault, cudaStream_t stream) {
  std::int64_t inner = t.inner;
  const auto even = [&](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % (2 * width) == 0; };
  while (width < 16 && inner % 2 == 0 && even(x) && even(y)) {
    inner /= 2;
    width *= 2;
  }
  switch (width) {
    case 1: return run_gather<std::uint8_t>(t, inner, x, indices, wide, y, fault, stream);
    case 2: return run_gather<std::uint16_t>(t, inner, x, indices, wide, y, fault, stream);
    case 4: return run_gather<std::uint32_t>(t, inner, x, indices, wide, y, fault, stream);
    case 8: return run_gather<std::uint64_t>(t, inner, x, indices, wide, y, fault, stream);
    default: return run_gather<Vec<std::uint32_t>>(t, inner, x, indices, wide, y, fault, stream);
  }
}

std::size_t gather_grad_scratch_bytes(const Table& t) {
  return static_cast<std::size_t>(4 * sort_words(t)) * sizeof(std::uint32_t);
}

void gather_grad(const Table& t, DType dtype, const void* dy_in, const void* indices, bool wide, void* out,
                 void* scratch, FaultWord* fault, cudaStream_t stream) {
  CHECK(t.count <= INT32_MAX && t.size < INT32_MAX, "GatherGrad of ", t.count, " indices into ", t.size);
  const std::int64_t words = sort_words(t), n = t.count;
  std::uint32_t* keys = static_cast<std::uint32_t*>(scratch);
  std::uint32_t* order = keys + words;
  std::uint32_t* other_keys = order + words;
  std::uint32_t* other_order = other_keys + words;
  launch("gather_keys", keys_kernel, grid_for(n), dim3(kThreads), 0, stream,
         {index_range(indices, wide, n), writes(keys, n), writes(order, n), fault_range(fault)}, indices,
         wide, n, t.size, keys, order, fault);
  for (int shift = 0; n > 1 && (t.size >> shift) != 0; shift += kDigitBits) {
    launch("gather_sort", sort_kernel, dim3(1), dim3(kSortThreads), 0, stream,
           {reads(keys, n), reads(order, n), writes(other_keys, n), writes(other_order, n)}, keys, order,
           other_keys, other_order, n, shift);
    std::swap(keys, other_keys);
    std::swap(order, other_order);
  }
  with_float("gather_grad", dtype, [&](auto element) {
    using T = decltype(element);
    const T* dy = static_cast<const T*>(dy_in);
    T* dx = static_cast<T*>(out);
    fill(dx, t.outer * t.size * t.inner, 0, sizeof(T), stream);
    const std::int64_t columns = t.outer * t.inner;
    const dim3 grid(static_cast<unsigned>(n), blocks_for(columns, kThreads, 1024));
    launch("gather_add_rows", add_rows_kernel<T>, grid, dim3(columns > 64 ? kThreads : 64), 0, stream,
           {reads(keys, n), reads(order, n), reads(dy, t.outer * n * t.inner),
            updates(dx, t.outer * t.size * t.inner)},
           keys, order, n, t.size, t.outer, t.inner, dy, dx);
  });
}

}  // namespace onnxddp::cuda

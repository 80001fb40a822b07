// Reductions over any axes in one or two passes; ArgMax; the count of labels.
#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {
namespace {

/// Sums run in A: float for floats, i64 for integers.
template <class T>
using Accumulator = std::conditional_t<std::is_integral_v<T>, std::int64_t, float>;

template <class T, class Op>
__device__ inline Accumulator<T> identity_of() {
  if constexpr (std::is_same_v<Op, SumOp>)
    return 0;
  else if constexpr (std::is_integral_v<T>)
    return sizeof(T) == 4 ? INT32_MIN : INT64_MIN;
  else
    return -INFINITY;
}

template <class T, class A>
__device__ inline T finished(A total, float scale) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(total);
  else
    return store<T>(total * scale);
}

/// Thread (lane, row) of a block reads elements row, row + rows, … of its part of output lane; the rows of a
/// lane are then combined in shared memory. partial: [parts, outputs], or null if there is one part.
template <class T, class A, class Op>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(Walk<2> kept, Walk<1> reduced, int lanes, int rows, bool along, const T* x, T* y,
                  A* partial, float scale) {
  ONNXDDP_SHARED(A, cell, [kThreads]);
  const Op op{};
  const int t = static_cast<int>(threadIdx.x);
  const int lane = along ? t / rows : t % lanes, row = along ? t % rows : t / lanes;
  const int next = along ? 1 : lanes;  // from a row's cell to that of the next row
  const std::int64_t output = std::int64_t{blockIdx.x} * lanes + lane;
  const std::int64_t begin = reduced.count * blockIdx.y / gridDim.y,
                     end = reduced.count * (blockIdx.y + 1) / gridDim.y;
  A total = identity_of<T, Op>();
  std::int64_t at[2] = {0, 0};
  if (output < kept.count) {
    kept.at(output, at);
    const T* base = x + at[1];
    for (std::int64_t i = begin + row; i < end; i += rows) {
      std::int64_t offset[1];
      reduced.at(i, offset);
      total = op(total, static_cast<A>(load(base[offset[0]])));
    }
  }
  cell[t] = total;
  for (int step = rows / 2; step > 0; step /= 2) {
    __syncthreads();
    if (row < step) {
      const A mine = cell[t], other = cell[t + step * next];
      cell[t] = op(mine, other);
    }
  }
  if (row != 0 || output >= kept.count) return;
  total = cell[t];
  if (partial != nullptr)
    partial[std::int64_t{blockIdx.y} * kept.count + output] = total;
  else
    y[at[0]] = finished<T, A>(total, scale);
}

template <class T, class A, class Op>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(Walk<2> kept, const A* partial, int parts, T* y, float scale) {
  const Op op{};
  for (std::int64_t i = first_item(); i < kept.count; i += item_step()) {
    A total = identity_of<T, Op>();
    for (int part = 0; part < parts; ++part) total = op(total, partial[part * kept.count + i]);
    std::int64_t at[2];
    kept.at(i, at);
    y[at[0]] = finished<T, A>(total, scale);
  }
}

template <class T, class Op>
void run(const ReducePlan& p, const void* in, void* out, void* scratch, float scale, cudaStream_t stream) {
  using A = Accumulator<T>;
  const T* x = static_cast<const T*>(in);
  T* y = static_cast<T*>(out);
  A* partial = p.parts > 1 ? static_cast<A*>(scratch) : nullptr;
  const std::int64_t outputs = p.kept.count, blocks = (outputs + p.lanes - 1) / p.lanes;
  std::int64_t low = p.kept.low[1] + p.reduced.low[0], high = p.kept.high[1] + p.reduced.high[0];
  const Range read = outputs == 0 || p.reduced.count == 0 ? reads(x, 0) : reads(x + low, high - low + 1);
  launch("reduce", reduce_kernel<T, A, Op>,
         dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.parts)), dim3(kThreads), 0, stream,
         {read, partial == nullptr ? walk_writes(y, p.kept, 0) : writes(y, 0),
          maybe_writes(partial, outputs * p.parts)},
         p.kept, p.reduced, p.lanes, p.rows, p.along, x, partial == nullptr ? y : nullptr, partial, scale);
  if (partial == nullptr) return;
  launch("reduce_parts", combine_kernel<T, A, Op>, grid_for(outputs), dim3(kThreads), 0, stream,
         {reads(partial, outputs * p.parts), walk_writes(y, p.kept, 0)}, p.kept, partial, p.parts, y, scale);
}

/// One warp a row. Ties go to the lower index; a NaN is never greater.
template <class T>
__global__ void __launch_bounds__(kThreads)
    arg_max_kernel(const T* x, std::int64_t* y, std::int64_t rows, std::int64_t n, std::int64_t inner) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t step = item_step() / kWarp;
  for (std::int64_t row = first_item() / kWarp; row < rows; row += step) {
    const T* from = x + row / inner * n * inner + row % inner;
    Compute<T> most = load(from[0]);
    std::int64_t best = 0;
    for (std::int64_t k = lane; k < n; k += kWarp) {
      const Compute<T> value = load(from[k * inner]);
      if (value > most) {
        most = value;
        best = k;
      }
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Compute<T> value = __shfl_xor_sync(0xffffffffu, most, offset);
      const std::int64_t index = __shfl_xor_sync(0xffffffffu, best, offset);
      if (value > most || (value == most && index < best)) {
        most = value;
        best = index;
      }
    }
    if (lane == 0) y[row] = best;
  }
}

template <class L>
__global__ void __launch_bounds__(1024)
    count_kernel(const L* labels, std::int64_t n, std::int64_t ignore, DType to, void* y) {
  std::int64_t kept = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x)
    kept += static_cast<std::int64_t>(labels[i]) != ignore;
  kept = block_sum(kept);
  if (threadIdx.x != 0) return;
  switch (to) {
    case DType::f32: *static_cast<float*>(y) = static_cast<float>(kept); break;
    case DType::bf16: *static_cast<bf16*>(y) = __float2bfloat16(static_cast<float>(kept)); break;
    case DType::f64: *static_cast<double*>(y) = static_cast<double>(kept); break;
    case DType::i64: *static_cast<std::int64_t*>(y) = kept; break;
    default: *static_cast<std::int32_t*>(y) = static_cast<std::int32_t>(kept);
  }
}

template <class L>
void count(const void* labels, std::int64_t n, std::int64_t ignore, DType to, void* y, cudaStream_t stream) {
  const std::int64_t width = to == DType::i64 || to == DType::f64 ? 8 : to == DType::bf16 ? 2 : 4;
  const L* data = static_cast<const L*>(labels);
  const unsigned threads = n > 256 ? 1024 : 64;
  launch("count_targets", count_kernel<L>, dim3(1), dim3(threads), 0, stream,
         {reads(data, n), writes(static_cast<char*>(y), width)}, data, n, ignore, to, y);
}

int power_of_two(std::int64_t n, int most) {
  int p = 1;
  while (p < most && p < n) p *= 2;
  return p;
}

ReducePlan spread(Walk<2> kept, Walk<1> reduced) {
  constexpr std::int64_t kBlocks = 512, kLeast = 8;  // blocks to fill a device; elements worth a thread
  ReducePlan p;
  p.kept = kept;
  p.reduced = reduced;
  const auto step = [](int rank, std::int64_t stride) { return rank == 0 ? INT64_MAX : std::abs(stride); };
  p.along = step(reduced.rank, reduced.stride[0][0]) <= step(kept.rank, kept.stride[1][0]);
  p.rows =
      p.along ? power_of_two((reduced.count + 3) / 4, kThreads) : power_of_two(reduced.count / kLeast, 8);
  if (kept.count < kThreads)
    p.rows =
        std::max(p.rows, power_of_two(reduced.count / kLeast, kThreads / power_of_two(kept.count, kThreads)));
  p.lanes = kThreads / p.rows;
  const std::int64_t blocks = std::max<std::int64_t>((kept.count + p.lanes - 1) / p.lanes, 1);
  const std::int64_t useful = reduced.count / (p.rows * kLeast);
  p.parts = static_cast<int>(std::max<std::int64_t>(1, std::min(kBlocks / blocks, useful)));
  return p;
}

}  // namespace

ReducePlan plan_reduce(const Ints& shape, const Ints& x_strides, const std::vector<bool>& gone,
                       const Ints& y_strides) {
  Ints kept, kept_x, kept_y, reduced, reduced_x;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    (gone[d] ? reduced : kept).push_back(shape[d]);
    (gone[d] ? reduced_x : kept_x).push_back(x_strides[d]);
    if (!gone[d]) kept_y.push_back(y_strides[d]);
  }
  return spread(make_walk<2>(kept, {kept_y, kept_x}), make_walk<1>(reduced, {reduced_x}));
}

ReducePlan plan_sum_to(const Ints& x_shape, const Ints& x_strides, const Ints& y_shape,
                       const Ints& y_strides) {
  const std::size_t lead = x_shape.size() - y_shape.size();
  std::vector<bool> gone(x_shape.size(), true);
  Ints strides(x_shape.size(), 0);
  for (std::size_t d = lead; d < x_shape.size(); ++d) {
    gone[d] = y_shape[d - lead] == 1 && x_shape[d] != 1;
    strides[d] = y_strides[d - lead];
  }
  return plan_reduce(x_shape, x_strides, gone, strides);
}

std::size_t reduce_scratch_bytes(const ReducePlan& plan) {
  return plan.parts > 1 ? static_cast<std::size_t>(plan.parts * plan.kept.count) * sizeof(std::int64_t) : 0;
}

void reduce(Reduction kind, const ReducePlan& plan, DType dtype, const void* x, void* y, void* scratch,
            cudaStream_t stream) {
  const float scale = kind == Reduction::mean ? 1.0f / static_cast<float>(plan.reduced.count) : 1.0f;
  with_number("reduce", dtype, [&](auto element) {
    using T = decltype(element);
    if (kind == Reduction::max)
      run<T, MaxOp>(plan, x, y, scratch, 1.0f, stream);
    else
      run<T, SumOp>(plan, x, y, scratch, scale, stream);
  });
}

void arg_max(DType dtype, const void* x, std::int64_t* y, std::int64_t outer, std::int64_t n,
             std::int64_t inner, cudaStream_t stream) {
  const std::int64_t rows = outer * inner;
  with_number("arg_max", dtype, [&](auto element) {
    using T = decltype(element);
    const T* from = static_cast<const T*>(x);
    launch("arg_max", arg_max_kernel<T>, grid_for(rows * kWarp), dim3(kThreads), 0, stream,
           {reads(from, rows * n), writes(y, rows)}, from, y, rows, n, inner);
  });
}

void count_targets(const void* labels, bool wide, std::int64_t n, std::int64_t ignore, DType to, void* y,
                   cudaStream_t stream) {
  if (wide)
    count<std::int64_t>(labels, n, ignore, to, y, stream);
  else
    count<std::int32_t>(labels, n, ignore, to, y, stream);
}

}  // namespace onnxddp::cuda

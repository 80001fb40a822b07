// Kernels that move elements by their width: strided copies with 128-bit and tiled paths, fill, and adding in
// place.
#include <cstdlib>

#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {
namespace {

/// An element of 16 bytes: four words that lie in a row in both tensors.
using Wide = Vec<std::uint32_t>;

template <class T>
__device__ inline void move_element(const T* from, T* to) {
  if constexpr (std::is_same_v<T, Wide>)
    store_vec(reinterpret_cast<std::uint32_t*>(to), load_vec(reinterpret_cast<const std::uint32_t*>(from)));
  else
    *to = *from;
}

template <class T>
__global__ void __launch_bounds__(kThreads) copy_kernel(Walk<2> walk, const T* x, T* y) {
  for (std::int64_t i = first_item(); i < walk.count; i += item_step()) {
    std::int64_t at[2];
    walk.at(i, at);
    move_element(x + at[1], y + at[0]);
  }
}

constexpr int kTile = 32, kTileRows = 8;

/// x is contiguous along one axis (`across` of them), y along the other (`along`): through a tile in shared
/// memory both sides are accessed in order. One block a tile; the other axes are in `rest`.
template <class T>
__global__ void __launch_bounds__(kTile* kTileRows)
    tile_kernel(Walk<2> rest, std::int64_t along, std::int64_t across, std::int64_t x_stride,
                std::int64_t y_stride, const T* x, T* y) {
  ONNXDDP_SHARED(T, tile, [kTile][kTile + 1]);
  const std::int64_t tiles_along = (along + kTile - 1) / kTile, tiles_across = (across + kTile - 1) / kTile;
  std::int64_t block = blockIdx.x, at[2];
  const std::int64_t first_along = block % tiles_along * kTile;
  block /= tiles_along;
  const std::int64_t first_across = block % tiles_across * kTile;
  rest.at(block / tiles_across, at);
  const int column = static_cast<int>(threadIdx.x) % kTile, row = static_cast<int>(threadIdx.x) / kTile;
  for (int r = row; r < kTile; r += kTileRows)
    if (first_along + r < along && first_across + column < across)
      tile[r][column] = x[at[1] + (first_along + r) * x_stride + first_across + column];
  __syncthreads();
  for (int r = row; r < kTile; r += kTileRows)
    if (first_across + r < across && first_along + column < along)
      y[at[0] + (first_across + r) * y_stride + first_along + column] = tile[column][r];
}

/// Runs the tiled kernel if the plan has the shape for it.
template <class T>
bool copy_tiles(const Walk<2>& walk, const T* x, T* y, cudaStream_t stream) {
  if (walk.rank < 2 || walk.stride[0][0] != 1 || walk.stride[1][0] == 1) return false;
  int axis = 1;
  while (axis < walk.rank && walk.stride[1][axis] != 1) ++axis;
  if (axis == walk.rank) return false;
  const std::int64_t along = walk.size[0].divisor(), across = walk.size[axis].divisor();
  if (along < kTile / 2 || across < kTile / 2) return false;
  Walk<2> rest;
  for (int d = 1; d < walk.rank; ++d) {
    if (d == axis) continue;
    rest.size[rest.rank] = walk.size[d];
    for (int k = 0; k < 2; ++k) rest.stride[k][rest.rank] = walk.stride[k][d];
    rest.count *= walk.size[d].divisor();
    ++rest.rank;
  }
  const std::int64_t blocks = (along + kTile - 1) / kTile * ((across + kTile - 1) / kTile) * rest.count;
  if (blocks > INT32_MAX) return false;
  launch("copy_tiles", tile_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kTile * kTileRows), 0,
         stream, {walk_writes(y, walk, 0), walk_reads(x, walk, 1)}, rest, along, across, walk.stride[1][0],
         walk.stride[0][axis], x, y);
  return true;
}

template <class T>
void run_copy(const Walk<2>& walk, const void* in, void* out, cudaStream_t stream) {
  const T* x = static_cast<const T*>(in);
  T* y = static_cast<T*>(out);
  if (walk.count == 0) return;
  if constexpr (!std::is_same_v<T, Wide>)
    if (copy_tiles(walk, x, y, stream)) return;
  launch("copy", copy_kernel<T>, grid_for(walk.count), dim3(kThreads), 0, stream,
         {walk_writes(y, walk, 0), walk_reads(x, walk, 1)}, walk, x, y);
}

/// The plan over elements of twice the width, if rows, strides and pointers allow it.
bool widen(Walk<2>& walk, std::size_t& width, const void* x, const void* y) {
  if (width == 16 || walk.count == 0 || walk.rank == 0 || walk.stride[0][0] != 1 || walk.stride[1][0] != 1)
    return false;
  const auto odd = [&](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % (2 * width) != 0; };
  if (odd(x) || odd(y) || walk.size[0].divisor() % 2 != 0) return false;
  for (int k = 0; k < 2; ++k)
    for (int d = 1; d < walk.rank; ++d)
      if (walk.stride[k][d] % 2 != 0) return false;
  width *= 2;
  walk.count /= 2;
  walk.size[0] = Divider(walk.size[0].divisor() / 2);
  for (int k = 0; k < 2; ++k) {
    for (int d = 1; d < walk.rank; ++d) walk.stride[k][d] /= 2;
    walk.low[k] /= 2;
    walk.high[k] = (walk.high[k] - 1) / 2;
  }
  return true;
}

template <class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* y, std::int64_t n, T value, bool vec) {
  std::int64_t done = 0;
  if (vec) {
    Vec<T> v;
    ONNXDDP_UNROLL
    for (int j = 0; j < kVec<T>; ++j) v.v[j] = value;
    const std::int64_t vectors = n / kVec<T>;
    for (std::int64_t i = first_item(); i < vectors; i += item_step()) store_vec(y + i * kVec<T>, v);
    done = vectors * kVec<T>;
  }
  for (std::int64_t i = done + first_item(); i < n; i += item_step()) y[i] = value;
}
template <class T>
void run_fill(void* out, std::int64_t n, std::uint64_t bits, cudaStream_t stream) {
  T* y = static_cast<T*>(out);
  const bool vec = vector_aligned(y);
  launch("fill", fill_kernel<T>, grid_for(vec ? (n + kVec<T> - 1) / kVec<T> : n), dim3(kThreads), 0, stream,
         {writes(y, n)}, y, n, static_cast<T>(bits), vec);
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_to_kernel(Walk<2> walk, const T* x, T* y) {
  for (std::int64_t i = first_item(); i < walk.count; i += item_step()) {
    std::int64_t at[2];
    walk.at(i, at);
    y[at[0]] = store<T>(load(y[at[0]]) + load(x[at[1]]));
  }
}

const char* at_byte(const void* p, std::int64_t offset) { return static_cast<const char*>(p) + offset; }
char* at_byte(void* p, std::int64_t offset) { return static_cast<char*>(p) + offset; }

std::int64_t dot(const Ints& a, const Ints& b) {
  std::int64_t sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

}  // namespace

CopyPlan plan_copy(const Ints& size, const Ints& y_strides, const Ints& x_strides, std::size_t width,
                   std::int64_t y_offset, std::int64_t x_offset) {
  return {make_walk<2>(size, {y_strides, x_strides}), y_offset, x_offset, width};
}

CopyPlan plan_transpose(const Ints& x_shape, const Ints& perm, std::size_t width) {
  const Ints x_strides = dense_strides(x_shape);
  Ints shape, strides;
  for (std::int64_t axis : perm) {
    shape.push_back(x_shape[static_cast<std::size_t>(axis)]);
    strides.push_back(x_strides[static_cast<std::size_t>(axis)]);
  }
  return plan_copy(shape, dense_strides(shape), strides, width);
}

CopyPlan plan_expand(const Ints& x_shape, const Ints& y_shape, std::size_t width) {
  return plan_copy(y_shape, dense_strides(y_shape),
                   broadcast_strides(x_shape, dense_strides(x_shape), y_shape), width);
}

CopyPlan plan_slice(const Ints& x_shape, const Ints& starts, const Ints& steps, const Ints& y_shape,
                    std::size_t width) {
  Ints strides = dense_strides(x_shape);
  const std::int64_t offset = dot(starts, strides);
  for (std::size_t d = 0; d < strides.size(); ++d) strides[d] *= steps[d];
  return plan_copy(y_shape, dense_strides(y_shape), strides, width, 0, offset);
}

CopyPlan plan_place(const Ints& x_shape, const Ints& y_shape, const Ints& starts, std::size_t width) {
  const Ints strides = dense_strides(y_shape);
  return plan_copy(x_shape, strides, dense_strides(x_shape), width, dot(starts, strides));
}

void copy(const CopyPlan& plan, const void* in, void* out, cudaStream_t stream) {
  const auto size = static_cast<std::int64_t>(plan.width);
  const char* x = at_byte(in, plan.x_offset * size);
  char* y = at_byte(out, plan.y_offset * size);
  Walk<2> walk = plan.walk;
  std::size_t width = plan.width;
  while (widen(walk, width, x, y)) {
  }
  switch (width) {
    case 1: return run_copy<std::uint8_t>(walk, x, y, stream);
    case 2: return run_copy<std::uint16_t>(walk, x, y, stream);
    case 4: return run_copy<std::uint32_t>(walk, x, y, stream);
    case 8: return run_copy<std::uint64_t>(walk, x, y, stream);
    default: return run_copy<Wide>(walk, x, y, stream);
  }
}

void fill(void* y, std::int64_t n, std::uint64_t bits, std::size_t width, cudaStream_t stream) {
  switch (width) {
    case 1: return run_fill<std::uint8_t>(y, n, bits, stream);
    case 2: return run_fill<std::uint16_t>(y, n, bits, stream);
    case 4: return run_fill<std::uint32_t>(y, n, bits, stream);
    default: return run_fill<std::uint64_t>(y, n, bits, stream);
  }
}

void pad(const void* x, const Ints& x_shape, void* y, const Ints& y_shape, const Ints& starts,
         std::uint64_t bits, std::size_t width, cudaStream_t stream) {
  std::int64_t n = 1;
  for (std::int64_t size : y_shape) n *= size;
  fill(y, n, bits, width, stream);
  copy(plan_place(x_shape, y_shape, starts, width), x, y, stream);
}

void add_to(const CopyPlan& plan, DType dtype, const void* in, void* out, cudaStream_t stream) {
  with_number("add_to", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in) + plan.x_offset;
    T* y = static_cast<T*>(out) + plan.y_offset;
    launch("add_to", add_to_kernel<T>, grid_for(plan.walk.count), dim3(kThreads), 0, stream,
           {walk_updates(y, plan.walk, 0), walk_reads(x, plan.walk, 1)}, plan.walk, x, y);
  });
}

}  // namespace onnxddp::cuda

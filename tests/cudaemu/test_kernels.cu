#include "executor/cuda/launch.h"
#include "tests/cudaemu/test_kernels.h"

namespace cudaemu_test {

using onnxddp::blocks_for;
using onnxddp::launch;
using onnxddp::reads;
using onnxddp::updates;
using onnxddp::writes;

namespace {

__device__ int64_t global_thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

__global__ void axpy_kernel(float a, const float* x, float* y, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = global_thread(); i < n; i += stride) y[i] = a * x[i] + y[i];
}

__global__ void fill_kernel(float* y, float value, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = global_thread(); i < n; i += stride) y[i] = value;
}

__global__ void transpose_kernel(const float* x, float* y, int rows, int cols) {
  ONNXDDP_SHARED(float, tile, [32][33]);
  int row = static_cast<int>(blockIdx.y * 32 + threadIdx.y),
      col = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  if (row < rows && col < cols) tile[threadIdx.y][threadIdx.x] = x[int64_t{row} * cols + col];
  __syncthreads();
  row = static_cast<int>(blockIdx.y * 32 + threadIdx.x);
  col = static_cast<int>(blockIdx.x * 32 + threadIdx.y);
  if (row < rows && col < cols) y[int64_t{col} * rows + row] = tile[threadIdx.x][threadIdx.y];
}

__global__ void reductions_kernel(const float* x, float* out, int64_t n) {
  float sum = 0, low = INFINITY, high = -INFINITY, parity[2] = {0, 0};
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    sum += x[i];
    low = fminf(low, x[i]);
    high = fmaxf(high, x[i]);
    parity[i % 2] += x[i];
  }
  sum = onnxddp::block_sum(sum);
  high = onnxddp::block_max(high);
  low = onnxddp::block_min(low);
  const float even = onnxddp::block_sum(parity[0]), odd = onnxddp::block_sum(parity[1]);
  if (threadIdx.x != 0) return;
  out[0] = sum;
  out[1] = high;
  out[2] = low;
  out[3] = even;
  out[4] = odd;
}

__global__ void warp_kernel(int* out, int threads) {
  const unsigned all = 0xffffffffu;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  int row = 0;
  const auto put = [&](int value) { out[row++ * threads + t] = value; };
  put(__shfl_xor_sync(all, t, 5));
  put(__shfl_down_sync(all, t, 3));
  put(__shfl_up_sync(all, t, 3));
  put(__shfl_sync(all, t, 7));
  put(__shfl_sync(all, t, 2, 8));
  put(__shfl_down_sync(all, t, 3, 8));
  put(static_cast<int>(__ballot_sync(all, lane % 3 == 0)));
  put(__any_sync(all, lane == 31));
  put(__all_sync(all, lane != 31));
  int half = -1;
  if (lane < 16) half = __shfl_xor_sync(0x0000ffffu, t, 1);
  put(half);
  __syncwarp();
  put(__shfl_xor_sync(all, int64_t{t} << 33, 1) == (int64_t{t ^ 1} << 33) ? 1 : 0);
}

__global__ void votes_kernel(const int* x, int* out) {
  const int p = x[threadIdx.x] != 0;
  const int all = __syncthreads_and(p), any = __syncthreads_or(p), count = __syncthreads_count(p);
  if (threadIdx.x != 0) return;
  out[0] = all != 0;
  out[1] = any != 0;
  out[2] = count;
}

__global__ void histogram_kernel(const int* x, int* bins, int64_t n) {
  ONNXDDP_SHARED(int, local, [16]);
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  __syncthreads();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = global_thread(); i < n; i += stride) atomicAdd(&local[x[i]], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], static_cast<int>(local[threadIdx.x]));
}

__global__ void atomics_kernel(int* cell, int* out) {
  out[0] = atomicAdd(cell, 5);
  out[1] = atomicMax(cell, 100);
  out[2] = atomicMin(cell, 7);
  out[3] = atomicExch(cell, 20);
  out[4] = atomicCAS(cell, 20, 21);
  out[5] = atomicCAS(cell, 20, 22);
  out[6] = atomicOr(cell, 64);
  out[7] = *cell;
}

__global__ void reverse_kernel(const float* x, float* y, int64_t n) {
  ONNXDDP_DYNAMIC_SHARED(float, buffer);
  const int64_t first = int64_t{blockIdx.x} * blockDim.x;
  const int64_t count = n - first < blockDim.x ? n - first : int64_t{blockDim.x};
  const int64_t t = threadIdx.x;
  if (t < count) buffer[t] = x[first + t];
  __syncthreads();
  if (t < count) y[first + t] = buffer[count - 1 - t];
}

__global__ void copy_vec_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = global_thread() * 4;
  if (i < n) onnxddp::store_vec(y + i, onnxddp::load_vec(x + i));
}

__global__ void grid_kernel(int* out) {
  atomicAdd(&out[6], 1);
  if (blockIdx.x + 1 != gridDim.x || blockIdx.y + 1 != gridDim.y || blockIdx.z + 1 != gridDim.z) return;
  out[0] = static_cast<int>(blockIdx.x);
  out[1] = static_cast<int>(blockIdx.y);
  out[2] = static_cast<int>(blockIdx.z);
  out[3] = static_cast<int>(gridDim.x);
  out[4] = static_cast<int>(gridDim.y);
  out[5] = static_cast<int>(gridDim.z);
}

__global__ void round_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = global_thread();
  if (i < n) y[i] = onnxddp::to_float(onnxddp::from_float<__nv_bfloat16>(x[i]));
}

__global__ void missing_barrier_kernel(const float* x, float* y) {
  ONNXDDP_SHARED(float, s, [128]);
  s[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = s[127 - threadIdx.x];
}

__global__ void missing_second_barrier_kernel(const float* x, float* y) {
  ONNXDDP_SHARED(float, s, [128]);
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float first = s[127 - threadIdx.x];
  s[threadIdx.x] = 2 * first;
  __syncthreads();
  y[threadIdx.x] = s[127 - threadIdx.x];
}

__global__ void unwritten_kernel(float* y) {
  ONNXDDP_SHARED(float, s, [2]);
  if (threadIdx.x == 0) s[0] = 1;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x % 2];
}

__global__ void shared_bounds_kernel(float* y) {
  ONNXDDP_DYNAMIC_SHARED(float, s);
  s[threadIdx.x] = 1;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}

__global__ void divergent_kernel(float* y) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  y[threadIdx.x] = 1;
}

__global__ void stuck_kernel(float* y) {
  if (threadIdx.x == 0)
    __syncwarp();
  else
    __syncthreads();
  y[threadIdx.x] = 1;
}

__global__ void fill_through_table_kernel(float* y, uintptr_t hidden) {
  y[threadIdx.x] = 1;
  reinterpret_cast<float*>(hidden)[threadIdx.x] = 1;
}

}  // namespace

void axpy(float a, const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch("axpy", axpy_kernel, dim3(blocks_for(n, 128, 4)), dim3(128), 0, stream, {reads(x, n), updates(y, n)},
         a, x, y, n);
}

void fill(float* y, float value, int64_t n, cudaStream_t stream) {
  launch("fill", fill_kernel, dim3(blocks_for(n, 128, 4)), dim3(128), 0, stream, {writes(y, n)}, y, value, n);
}

void transpose(const float* x, float* y, int rows, int cols, cudaStream_t stream) {
  launch("transpose", transpose_kernel, dim3(blocks_for(cols, 32), blocks_for(rows, 32)), dim3(32, 32), 0,
         stream, {reads(x, int64_t{rows} * cols), writes(y, int64_t{rows} * cols)}, x, y, rows, cols);
}

void reductions(const float* x, float* out, int64_t n, int threads, cudaStream_t stream) {
  launch("reductions", reductions_kernel, dim3(1), dim3(static_cast<unsigned>(threads)), 0, stream,
         {reads(x, n), writes(out, 5)}, x, out, n);
}

void warp_functions(int* out, int threads, cudaStream_t stream) {
  launch("warp_functions", warp_kernel, dim3(1), dim3(static_cast<unsigned>(threads)), 0, stream,
         {writes(out, int64_t{11} * threads)}, out, threads);
}

void votes(const int* x, int* out, int threads, cudaStream_t stream) {
  launch("votes", votes_kernel, dim3(1), dim3(static_cast<unsigned>(threads)), 0, stream,
         {reads(x, threads), writes(out, 3)}, x, out);
}

void histogram(const int* x, int* bins, int64_t n, cudaStream_t stream) {
  launch("histogram", histogram_kernel, dim3(3), dim3(64), 0, stream, {reads(x, n), updates(bins, 16)}, x,
         bins, n);
}

void atomics(int* cell, int* out, cudaStream_t stream) {
  launch("atomics", atomics_kernel, dim3(1), dim3(1), 0, stream, {updates(cell, 1), writes(out, 8)}, cell,
         out);
}

void reverse_blocks(const float* x, float* y, int64_t n, int threads, size_t shared_bytes,
                    cudaStream_t stream) {
  launch("reverse_blocks", reverse_kernel, dim3(blocks_for(n, threads)), dim3(static_cast<unsigned>(threads)),
         shared_bytes, stream, {reads(x, n), writes(y, n)}, x, y, n);
}

void copy_vec(const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch("copy_vec", copy_vec_kernel, dim3(blocks_for(n / 4, 64)), dim3(64), 0, stream,
         {reads(x, n), writes(y, n)}, x, y, n);
}

void grid_shape(int* out, int gx, int gy, int gz, cudaStream_t stream) {
  launch("grid_shape", grid_kernel,
         dim3(static_cast<unsigned>(gx), static_cast<unsigned>(gy), static_cast<unsigned>(gz)), dim3(1), 0,
         stream, {updates(out, 7)}, out);
}

void round_bf16(const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch("round_bf16", round_kernel, dim3(blocks_for(n, 64)), dim3(64), 0, stream,
         {reads(x, n), writes(y, n)}, x, y, n);
}

void bug_out_of_bounds(float* y, int64_t n, cudaStream_t stream) {
  launch("bug_out_of_bounds", fill_kernel, dim3(1), dim3(32), 0, stream, {writes(y, n)}, y, 1.0f, n + 8192);
}

void bug_out_of_bounds_by_one(float* y, int64_t n, cudaStream_t stream) {
  launch("bug_out_of_bounds_by_one", fill_kernel, dim3(1), dim3(32), 0, stream, {writes(y, n)}, y, 1.0f,
         n + 1);
}

void bug_missing_barrier(const float* x, float* y, cudaStream_t stream) {
  launch("bug_missing_barrier", missing_barrier_kernel, dim3(1), dim3(128), 0, stream,
         {reads(x, 128), writes(y, 128)}, x, y);
}

void bug_missing_second_barrier(const float* x, float* y, cudaStream_t stream) {
  launch("bug_missing_second_barrier", missing_second_barrier_kernel, dim3(1), dim3(128), 0, stream,
         {reads(x, 128), writes(y, 128)}, x, y);
}

void bug_unwritten_shared(float* y, cudaStream_t stream) {
  launch("bug_unwritten_shared", unwritten_kernel, dim3(1), dim3(64), 0, stream, {writes(y, 64)}, y);
}

void bug_shared_out_of_bounds(float* y, cudaStream_t stream) {
  launch("bug_shared_out_of_bounds", shared_bounds_kernel, dim3(1), dim3(64), 63 * sizeof(float), stream,
         {writes(y, 64)}, y);
}

void bug_divergent_barrier(float* y, cudaStream_t stream) {
  launch("bug_divergent_barrier", divergent_kernel, dim3(1), dim3(64), 0, stream, {writes(y, 64)}, y);
}

void bug_stuck_barrier(float* y, cudaStream_t stream) {
  launch("bug_stuck_barrier", stuck_kernel, dim3(1), dim3(32), 0, stream, {writes(y, 32)}, y);
}

void bug_undeclared(float* y, float* hidden, cudaStream_t stream) {
  launch("bug_undeclared", fill_through_table_kernel, dim3(1), dim3(32), 0, stream, {writes(y, 32)}, y,
         reinterpret_cast<uintptr_t>(hidden));
}

void bug_reads_uninitialised(const float* x, float* y, int64_t n, cudaStream_t stream) {
  launch("bug_reads_uninitialised", axpy_kernel, dim3(1), dim3(32), 0, stream, {reads(x, n), updates(y, n)},
         1.0f, x, y, n);
}

void bug_partial_write(float* y, int64_t n, cudaStream_t stream) {
  launch("bug_partial_write", fill_kernel, dim3(1), dim3(32), 0, stream, {writes(y, n)}, y, 1.0f, n - 1);
}

}  // namespace cudaemu_test

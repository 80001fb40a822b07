// Kernels of the conformance and fault tests.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cudaemu_test {

/// y[i] = a * x[i] + y[i].
void axpy(float a, const float* x, float* y, int64_t n, cudaStream_t stream);
/// y[i] = value.
void fill(float* y, float value, int64_t n, cudaStream_t stream);
/// y = x^T by tiles in shared memory; x: [rows, cols].
void transpose(const float* x, float* y, int rows, int cols, cudaStream_t stream);
/// out[0..4] = sum, max, min of x and the sums of even and odd indices, by one block of `threads`.
void reductions(const float* x, float* out, int64_t n, int threads, cudaStream_t stream);
/// Every warp function once; out: [11, threads] ints. See the test for the rows.
void warp_functions(int* out, int threads, cudaStream_t stream);
/// __syncthreads_and, _or, _count over `x[i] != 0`; out: 3 ints of one block.
void votes(const int* x, int* out, int threads, cudaStream_t stream);
/// bins[x[i]] += 1 by shared and then global atomics; 16 bins.
void histogram(const int* x, int* bins, int64_t n, cudaStream_t stream);
/// out: old values of add, max, min, exch, cas (hit), cas (miss), or, and the final word (8 ints) on cell[0].
void atomics(int* cell, int* out, cudaStream_t stream);
/// Reverses x in blocks of `threads` through dynamic shared memory of `shared_bytes` (at least threads * 4).
void reverse_blocks(const float* x, float* y, int64_t n, int threads, size_t shared_bytes,
                    cudaStream_t stream);
/// y = x by 128-bit accesses; n must be a multiple of 4 (unaligned pointers are a fault).
void copy_vec(const float* x, float* y, int64_t n, cudaStream_t stream);
/// out[0..5] = blockIdx and gridDim of the last block of a (gx, gy, gz) grid; out[6] = number of blocks.
void grid_shape(int* out, int gx, int gy, int gz, cudaStream_t stream);
/// Two bf16 round trips: y[i] = float(bf16(x[i])).
void round_bf16(const float* x, float* y, int64_t n, cudaStream_t stream);

// Each of these holds one bug.
void bug_out_of_bounds(float* y, int64_t n, cudaStream_t stream);         ///< writes y[0, n + 8192)
void bug_out_of_bounds_by_one(float* y, int64_t n, cudaStream_t stream);  ///< writes y[n]
void bug_missing_barrier(const float* x, float* y,
                         cudaStream_t stream);  ///< reads before others have written
void bug_missing_second_barrier(const float* x, float* y,
                                cudaStream_t stream);  ///< overwrites before others have read
void bug_unwritten_shared(float* y, cudaStream_t stream);
void bug_shared_out_of_bounds(float* y, cudaStream_t stream);
void bug_divergent_barrier(float* y, cudaStream_t stream);  ///< half of the threads wait at another barrier
void bug_stuck_barrier(float* y, cudaStream_t stream);      ///< a warp function that some lanes never reach
void bug_undeclared(float* y, float* hidden,
                    cudaStream_t stream);  ///< writes a buffer that the launch does not declare
void bug_reads_uninitialised(const float* x, float* y, int64_t n,
                             cudaStream_t stream);                 ///< not in the kernel
void bug_partial_write(float* y, int64_t n, cudaStream_t stream);  ///< declares n elements, writes n - 1

}  // namespace cudaemu_test

// Two sums a channel over everything else, in two passes: for batch norm and the parameters of layer norm.
#pragma once

#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {

/// How the elements of the channels are spread over threads and blocks; see reduce.cu.
struct ChannelSpread {
  Divider size;  // of Channels::size
  std::int64_t c, count;
  bool pixels;
  int lanes, rows, parts;
  /// Memory index of element i of channel k.
  ONNXDDP_HD std::int64_t at(std::int64_t i, std::int64_t k) const {
    if (pixels) return i * c + k;
    const std::int64_t within = size.split(i);
    return (i * c + k) * size.divisor() + within;
  }
};

inline ChannelSpread spread_channels(const Channels& v) {
  constexpr std::int64_t kBlocks = 512, kLeast = 16;
  ChannelSpread s{Divider(v.size), v.c, v.count(), v.pixels, 1, kThreads, 1};
  if (v.pixels) {
    while (s.lanes < 32 && s.lanes < v.c) s.lanes *= 2;
  } else {
    while (s.lanes < 32 && s.count * s.lanes < kThreads) s.lanes *= 2;
  }
  s.rows = kThreads / s.lanes;
  const std::int64_t blocks = std::max<std::int64_t>((v.c + s.lanes - 1) / s.lanes, 1);
  s.parts =
      static_cast<int>(std::max<std::int64_t>(1, std::min(kBlocks / blocks, s.count / (s.rows * kLeast))));
  return s;
}

struct SumPair {
  double a, b;
};
inline std::size_t channel_sums_bytes(const Channels& v) {
  return static_cast<std::size_t>(spread_channels(v).parts * v.c) * sizeof(SumPair);
}

/// partial[part][k] = sums of the part's terms of channel k. term(at, i, k, a, b) gives two floats for memory
/// index `at`, element i of channel k. Threads sum in float, their sums are combined in double.
template <class Term>
__global__ void __launch_bounds__(kThreads)
    channel_sums_kernel(ChannelSpread s, Term term, SumPair* partial) {
  ONNXDDP_SHARED(double, first, [kThreads]);
  ONNXDDP_SHARED(double, second, [kThreads]);
  const int t = static_cast<int>(threadIdx.x);
  const int lane = s.pixels ? t % s.lanes : t / s.rows, row = s.pixels ? t / s.lanes : t % s.rows;
  const int next = s.pixels ? s.lanes : 1;
  const std::int64_t k = std::int64_t{blockIdx.x} * s.lanes + lane;
  const std::int64_t begin = s.count * blockIdx.y / gridDim.y, end = s.count * (blockIdx.y + 1) / gridDim.y;
  float sum_a = 0, sum_b = 0;
  if (k < s.c) {
    for (std::int64_t i = begin + row; i < end; i += s.rows) {
      float a, b;
      term(s.at(i, k), i, k, a, b);
      sum_a += a;
      sum_b += b;
    }
  }
  first[t] = static_cast<double>(sum_a);
  second[t] = static_cast<double>(sum_b);
  for (int step = s.rows / 2; step > 0; step /= 2) {
    __syncthreads();
    if (row < step) {
      const double a = first[t + step * next], b = second[t + step * next];
      first[t] += a;
      second[t] += b;
    }
  }
  if (row == 0 && k < s.c) partial[blockIdx.y * s.c + k] = {first[t], second[t]};
}

/// Totals of channel k in the order of the parts.
__device__ inline SumPair channel_total(const SumPair* partial, int parts, std::int64_t c, std::int64_t k) {
  SumPair total{0, 0};
  for (int part = 0; part < parts; ++part) {
    const SumPair p = partial[part * c + k];
    total.a += p.a;
    total.b += p.b;
  }
  return total;
}

/// Queues the first pass. `ranges`: what `term` reads.
template <class Term>
void launch_channel_sums(const char* name, const ChannelSpread& s, const Term& term,
                         std::vector<Range> ranges, SumPair* partial, cudaStream_t stream) {
  ranges.push_back(writes(partial, s.parts * s.c));
  launch(name, channel_sums_kernel<Term>,
         dim3(static_cast<unsigned>((s.c + s.lanes - 1) / s.lanes), static_cast<unsigned>(s.parts)),
         dim3(kThreads), 0, stream, ranges, s, term, partial);
}

}  // namespace onnxddp::cuda

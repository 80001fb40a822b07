// Dropout with the decisions of philox.h: the same bits as on every other device.
#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"
#include "executor/philox.h"

namespace onnxddp::cuda {
namespace {

/// The number that decides about element i. (Indexing the block by a variable would put it into local
/// memory.)
__device__ inline std::uint32_t word_of(const DropoutBits& bits, std::int64_t i) {
  const std::uint64_t number = bits.global(i);
  const Philox block = bits.block(number >> 2);
  const std::uint32_t low = (number & 1) != 0 ? block.word[1] : block.word[0];
  const std::uint32_t high = (number & 1) != 0 ? block.word[3] : block.word[2];
  return (number & 2) != 0 ? high : low;
}

/// A thread takes four elements; where their global numbers are the four of one Philox block, one block
/// serves them all.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* x, const std::int64_t* state, std::int64_t key, double ratio, std::int64_t inner,
                   float scale, T* y, bool* mask, std::int64_t n) {
  const DropoutBits bits = DropoutBits::from(state, key, ratio, inner);
  const bool together = inner == 0 || inner % 4 == 0 || bits.world == 1;
  for (std::int64_t i = first_item() * 4; i < n; i += item_step() * 4) {
    Philox block{};
    if (together) block = bits.block(bits.global(i) >> 2);
    ONNXDDP_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (i + j >= n) break;
      const std::uint32_t word = together ? block.word[j] : word_of(bits, i + j);
      const bool keep = word >= bits.threshold;
      if (mask != nullptr) mask[i + j] = keep;
      y[i + j] = store<T>(keep ? load(x[i + j]) * scale : 0.0f);
    }
  }
}

}  // namespace

void dropout(DType dtype, const void* in, const std::int64_t* state, std::int64_t key, double ratio,
             std::int64_t inner, void* out, bool* mask, std::int64_t n, cudaStream_t stream) {
  const float scale = static_cast<float>(ratio < 1.0 ? 1.0 / (1.0 - ratio) : 0.0);
  with_float("dropout", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    T* y = static_cast<T*>(out);
    launch("dropout", dropout_kernel<T>, grid_for((n + 3) / 4), dim3(kThreads), 0, stream,
           {reads(x, n), reads(state, 5), writes(y, n), maybe_writes(mask, n)}, x, state, key, ratio, inner,
           scale, y, mask, n);
  });
}

}  // namespace onnxddp::cuda

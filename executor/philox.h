// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011), the
// random numbers of dropout: the same bits on every device and for any number of ranks.
#pragma once

#include <cstdint>

#include "executor/scalar_ops.h"

namespace onnxddp {

struct Philox {
  std::uint32_t word[4];
};

/// Block number `counter` of the stream `key`.
ONNXDDP_HD Philox philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                         std::uint64_t key) {
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
#if defined(__CUDA_ARCH__)
#pragma unroll
#elif !defined(__CUDACC__)
#pragma GCC unroll 10  // so that a loop over blocks becomes vector code
#endif
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Spreads all bits of x over the result (the finaliser of splitmix64).
ONNXDDP_HD std::uint64_t mix_bits(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// Dropout's decisions for one tensor of one rank. `state` is the op's i64[5] input: seed, step, micro-step,
/// rank, world.
struct DropoutBits {
  std::uint64_t key;
  std::uint32_t step, micro_step;
  std::int64_t rank, world, inner;  // inner: elements of one row; 0 where the tensor is not batch-major
  std::uint64_t threshold;          // ratio in 2^-32

  /// `name_key`: attribute `key` of the op. `inner` > 0: batch=1, elements of a row.
  ONNXDDP_HD static DropoutBits from(const std::int64_t* state, std::int64_t name_key, double ratio,
                                     std::int64_t inner) {
    const std::uint64_t who = inner > 0 ? 0 : static_cast<std::uint64_t>(state[3]) + 1;
    const std::uint64_t key = mix_bits(static_cast<std::uint64_t>(state[0]) ^
                                       mix_bits(static_cast<std::uint64_t>(name_key) ^ mix_bits(who)));
    return {key,
            static_cast<std::uint32_t>(state[1]),
            static_cast<std::uint32_t>(state[2]),
            state[3],
            state[4],
            inner,
            static_cast<std::uint64_t>(ratio * 4294967296.0)};
  }
  /// Number of local element i among the elements of all ranks.
  ONNXDDP_HD std::uint64_t global(std::int64_t i) const {
    if (inner == 0) return static_cast<std::uint64_t>(i);
    return static_cast<std::uint64_t>(((i / inner) * world + rank) * inner + i % inner);
  }
  ONNXDDP_HD Philox block(std::uint64_t number) const {
    return philox(static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32), step,
                  micro_step, key);
  }
  /// Whether local element i is kept. (Elements 4k..4k+3 by global number share block k.)
  ONNXDDP_HD bool keep(std::int64_t i) const {
    const std::uint64_t g = global(i);
    return block(g >> 2).word[g & 3] >= threshold;
  }
};

}  // namespace onnxddp

// Which rows a rank reads in an epoch: torch's DistributedSampler + DataLoader, bit for bit (ddp.md 1.5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

struct SamplerOptions {
  std::string kind = "torch";
  std::int64_t size = 0;  // rows
  int rank = 0, world_size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;
  bool drop_last = false;         // DistributedSampler's drop_last: truncate instead of padding
  bool drop_short_batch = false;  // DataLoader's drop_last
  std::int64_t batch_size = 32;   // per rank
};

class Sampler {
 public:
  explicit Sampler(SamplerOptions options);
  /// Batches of this rank in epoch e (0-based): lists of row indices. Same number of batches, of the same
  /// sizes, on every rank.
  std::vector<std::vector<std::int64_t>> epoch(std::int64_t e) const;
  std::int64_t batches_per_epoch() const;
  std::int64_t rows_per_rank() const;
  const SamplerOptions& options() const { return options_; }

 private:
  SamplerOptions options_;
};

/// torch.randperm(n, generator seeded with `seed`) of PyTorch 2.15, bit for bit.
std::vector<std::int64_t> torch_randperm(std::int64_t n, std::uint64_t seed);

}  // namespace onnxddp

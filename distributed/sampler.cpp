#include "distributed/sampler.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace onnxddp {
namespace {

// From this length on, 32 random bits would be visibly uneven: torch draws 64.
constexpr std::int64_t kWideDraws = 214'748'364;  // (2^32 - 1) / 20

std::uint64_t draw64(std::mt19937& random) {
  const std::uint64_t high = random();
  return high << 32 | random();
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Rows of `rank` before batching.
std::int64_t share(const SamplerOptions& o, int rank) {
  if (o.kind == "exact") return (o.size - rank + o.world_size - 1) / o.world_size;
  return o.drop_last ? o.size / o.world_size : ceil_div(o.size, o.world_size);
}

}  // namespace

std::vector<std::int64_t> torch_randperm(std::int64_t n, std::uint64_t seed) {
  CHECK(n >= 0, n);
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  std::vector<std::int64_t> p(static_cast<std::size_t>(n));
  if (n < kWideDraws) {
    std::iota(p.begin(), p.end(), std::int64_t{0});
    for (std::int64_t i = 0; i + 1 < n; ++i) {
      const auto z = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n - i));
      std::swap(p[static_cast<std::size_t>(i)], p[static_cast<std::size_t>(i + z)]);
    }
    return p;
  }
  for (std::uint64_t i = 0; i < p.size(); ++i) {
    const std::uint64_t z = draw64(random) % (i + 1);
    p[i] = p[z];
    p[z] = static_cast<std::int64_t>(i);
  }
  return p;
}

Sampler::Sampler(SamplerOptions options) : options_(std::move(options)) {
  const auto& o = options_;
  if (o.kind != "torch" && o.kind != "exact") {
    throw usage_error(cat("unknown sampler '", o.kind, "'")).hint("torch or exact");
  }
  if (o.batch_size < 1) throw usage_error(cat("the batch size must be at least 1, not ", o.batch_size));
  if (o.size < 1) throw Error("the data has no rows");
  CHECK(o.world_size >= 1 && o.rank >= 0 && o.rank < o.world_size, o.rank, " of ", o.world_size);
}

std::int64_t Sampler::rows_per_rank() const { return share(options_, options_.rank); }

std::int64_t Sampler::batches_per_epoch() const {
  const std::int64_t rows = share(options_, 0);  // the largest share: all ranks make as many batches
  return options_.drop_short_batch ? rows / options_.batch_size : ceil_div(rows, options_.batch_size);
}

std::vector<std::vector<std::int64_t>> Sampler::epoch(std::int64_t e) const {
  const auto& o = options_;
  std::vector<std::int64_t> order;
  if (o.shuffle) order = torch_randperm(o.size, o.seed + static_cast<std::uint64_t>(e));
  const std::int64_t rows = rows_per_rank();
  std::vector<std::vector<std::int64_t>> batches(static_cast<std::size_t>(batches_per_epoch()));
  std::int64_t taken = 0;
  for (auto& batch : batches) {
    const std::int64_t end = std::min(taken + o.batch_size, rows);
    for (; taken < end; ++taken) {
      const std::int64_t at = (o.rank + taken * o.world_size) % o.size;  // padding starts over from the front
      batch.push_back(o.shuffle ? order[static_cast<std::size_t>(at)] : at);
    }
  }
  return batches;
}

}  // namespace onnxddp

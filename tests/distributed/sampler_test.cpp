#include "distributed/sampler.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "distributed/digest.h"

namespace onnxddp {
namespace {

using Rows = std::vector<std::int64_t>;

// First 16 hex digits of the SHA-256 over little-endian 64-bit integers.
std::string digest(const Rows& rows) {
  const auto sum = sha256({reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(rows[0])});
  return to_hex(sum.data(), 8);
}

Rows first(Rows rows, std::size_t n) {
  rows.resize(n);
  return rows;
}

SamplerOptions make(std::int64_t size, int world_size, std::int64_t batch_size = 1000) {
  SamplerOptions options;
  options.size = size;
  options.world_size = world_size;
  options.batch_size = batch_size;
  return options;
}

// The rows of every rank in one epoch, batches joined.
std::vector<Rows> shares(SamplerOptions options, std::int64_t epoch = 0) {
  std::vector<Rows> all;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
    Rows rows;
    for (const auto& batch : Sampler(options).epoch(epoch))
      rows.insert(rows.end(), batch.begin(), batch.end());
    EXPECT_EQ(static_cast<std::int64_t>(rows.size()), Sampler(options).rows_per_rank());
    all.push_back(rows);
  }
  return all;
}

TEST(Randperm, EqualsTorch) {
  EXPECT_EQ(digest(torch_randperm(10, 0)), "03a19defe024a605");
  EXPECT_EQ(first(torch_randperm(10, 0), 8), (Rows{4, 1, 7, 5, 3, 9, 0, 8}));
  EXPECT_EQ(digest(torch_randperm(100, 0)), "9ff274cf694671cd");
  EXPECT_EQ(digest(torch_randperm(1000, 0)), "cee4a88ef6120e8e");
  EXPECT_EQ(digest(torch_randperm(70000, 0)), "4eaceefb41fec1e7");
  EXPECT_EQ(digest(torch_randperm(300000, 0)), "2306946423d2a077");
  EXPECT_EQ(first(torch_randperm(300000, 0), 4), (Rows{36044, 156727, 35413, 30024}));
  EXPECT_EQ(digest(torch_randperm(10, 1)), "8ac12b94b3cbbdce");
  EXPECT_EQ(digest(torch_randperm(10, 42)), "fd6484606b698821");
  EXPECT_EQ(digest(torch_randperm(1000, 42)), "ac5c22de20fc5d16");
}

TEST(Randperm, UsesTheLow32BitsOfTheSeed) {
  EXPECT_EQ(digest(torch_randperm(10, (std::uint64_t{1} << 32) + 7)), "f014096e9e06f49b");
  EXPECT_EQ(digest(torch_randperm(1000, (std::uint64_t{1} << 40) + 3)), "f0818b66bc03445e");
  EXPECT_EQ(torch_randperm(1000, (std::uint64_t{1} << 40) + 3), torch_randperm(1000, 3));
}

TEST(Randperm, HandlesNothingAndOne) {
  EXPECT_EQ(torch_randperm(0, 5), Rows{});
  EXPECT_EQ(torch_randperm(1, 5), Rows{0});
}

// The algorithm changes at this length; each permutation takes 1.7 GB.
TEST(RandpermFull, EqualsTorchAroundTheChangeOfAlgorithm) {
  {
    const Rows below = torch_randperm(214'748'363, 3);
    EXPECT_EQ(Rows(below.begin(), below.begin() + 3), (Rows{3426993, 89012687, 34994685}));
    EXPECT_EQ(below.back(), 92186696);
  }
  const Rows at = torch_randperm(214'748'364, 3);
  EXPECT_EQ(Rows(at.begin(), at.begin() + 3), (Rows{50815193, 116864026, 18612126}));
  EXPECT_EQ(at.back(), 138283752);
}

TEST(Sampler, PadsOrDropsLikeDistributedSampler) {
  auto options = make(10, 3);
  options.shuffle = false;
  EXPECT_EQ(shares(options), (std::vector<Rows>{{0, 3, 6, 9}, {1, 4, 7, 0}, {2, 5, 8, 1}}));
  options.drop_last = true;
  EXPECT_EQ(shares(options), (std::vector<Rows>{{0, 3, 6}, {1, 4, 7}, {2, 5, 8}}));
  auto tiny = make(2, 5);
  tiny.shuffle = false;
  EXPECT_EQ(shares(tiny), (std::vector<Rows>{{0}, {1}, {0}, {1}, {0}}));
}

TEST(Sampler, ShufflesLikeDistributedSampler) {
  auto options = make(10, 3);
  EXPECT_EQ(shares(options, 0), (std::vector<Rows>{{4, 5, 0, 2}, {1, 3, 8, 4}, {7, 9, 6, 1}}));
  EXPECT_EQ(shares(options, 1), (std::vector<Rows>{{5, 2, 9, 4}, {6, 0, 3, 5}, {1, 8, 7, 6}}));
  options.seed = 1;
  EXPECT_EQ(shares(options, 0), (std::vector<Rows>{{5, 2, 9, 4}, {6, 0, 3, 5}, {1, 8, 7, 6}}));
  options.seed = 7;
  options.drop_last = true;
  EXPECT_EQ(shares(options, 2), (std::vector<Rows>{{0, 7, 9}, {5, 6, 1}, {8, 2, 4}}));
  auto eleven = make(11, 4);
  eleven.drop_last = true;
  EXPECT_EQ(shares(eleven), (std::vector<Rows>{{10, 5}, {0, 8}, {4, 2}, {3, 1}}));
}

// Orders recorded from reference runs of PyTorch with two ranks: digests of rank 0, rank 1 in epochs 0, 1, …
struct Golden {
  const char* name;
  std::int64_t size, batch_size;
  std::uint64_t seed;
  bool shuffle;
  std::vector<std::string> digests;
};

TEST(Sampler, ReproducesTheReferenceRuns) {
  const std::vector<Golden> goldens = {
      {"toy",
       4,
       2,
       0,
       true,
       {"96fb5e4a2704b410", "0c730b69905c5ef7", "0c730b69905c5ef7", "59d5966c96af7eca"}},
      {"digits_mlp",
       1797,
       32,
       7,
       true,
       {"51a2d5e5dd01f9a7", "6d2f48500a30dc18", "0773f062c3e447ff", "fe629112094bebfc"}},
      {"digits_cnn",
       1797,
       32,
       3,
       true,
       {"d55ba7a3958b85c9", "b00846d7e5df3aa9", "557f801d65774375", "b252081d9a86e9d3"}},
      {"gpt",
       96,
       4,
       11,
       true,
       {"59e12de45892458d", "5bdf25434bf5f25a", "3b7561e920f2c6f3", "a8d8b16f30866ca3", "2e7a15ff65fb7e33",
        "e11b63f64f5f179d"}},
      {"lstm",
       64,
       8,
       0,
       false,
       {"8c072ba01763a0c9", "3fcbc1c6ad586fe6", "8c072ba01763a0c9", "3fcbc1c6ad586fe6"}},
  };
  for (const auto& golden : goldens) {
    auto options = make(golden.size, 2, golden.batch_size);
    options.seed = golden.seed;
    options.shuffle = golden.shuffle;
    for (std::size_t i = 0; i < golden.digests.size(); ++i) {
      EXPECT_EQ(digest(shares(options, static_cast<std::int64_t>(i / 2))[i % 2]), golden.digests[i])
          << golden.name << " " << i;
    }
  }
}

std::vector<std::size_t> batch_sizes(const SamplerOptions& options) {
  std::vector<std::size_t> sizes;
  for (const auto& batch : Sampler(options).epoch(0)) sizes.push_back(batch.size());
  EXPECT_EQ(static_cast<std::int64_t>(sizes.size()), Sampler(options).batches_per_epoch());
  return sizes;
}

TEST(Sampler, CutsBatchesLikeDataLoader) {
  auto options = make(21, 2, 4);
  EXPECT_EQ(batch_sizes(options), (std::vector<std::size_t>{4, 4, 3}));
  options.drop_short_batch = true;
  EXPECT_EQ(batch_sizes(options), (std::vector<std::size_t>{4, 4}));
  options.drop_last = true;
  options.drop_short_batch = false;
  EXPECT_EQ(batch_sizes(options), (std::vector<std::size_t>{4, 4, 2}));
}

TEST(Sampler, ExactShowsEachRowOnceInEquallyManyBatches) {
  for (int world_size : {1, 2, 3, 4}) {
    auto options = make(21, world_size, 5);
    options.kind = "exact";
    std::vector<int> seen(21, 0);
    std::int64_t batches = -1;
    for (options.rank = 0; options.rank < world_size; ++options.rank) {
      const Sampler sampler(options);
      if (batches < 0) batches = sampler.batches_per_epoch();
      EXPECT_EQ(sampler.batches_per_epoch(), batches);
      EXPECT_EQ(static_cast<std::int64_t>(sampler.epoch(3).size()), batches);
      for (const auto& batch : sampler.epoch(3)) {
        for (auto row : batch) ++seen[static_cast<std::size_t>(row)];
      }
    }
    EXPECT_EQ(seen, std::vector<int>(21, 1)) << world_size;
  }
}

TEST(Sampler, ExactGivesARankWithoutRowsAnEmptyBatch) {
  auto options = make(2, 3, 5);
  options.kind = "exact";
  options.rank = 2;
  EXPECT_EQ(Sampler(options).epoch(0), std::vector<Rows>{Rows{}});
}

TEST(Sampler, RefusesWhatCannotBe) {
  EXPECT_THROW(Sampler(make(0, 1)), Error);
  EXPECT_THROW(Sampler(make(4, 1, 0)), Error);
  auto options = make(4, 1);
  options.kind = "random";
  EXPECT_THROW(Sampler{options}, Error);
}

}  // namespace
}  // namespace onnxddp

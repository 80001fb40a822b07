// Through the command line: any split of the same global batch over ranks and micro-batches trains the same.
#include <gtest/gtest.h>

#include <cmath>

#include "importer/dataset.h"
#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

/// 96 images with labels, some of them -100 in uneven numbers: the first rank's batches hold fewer kept
/// labels.
void write_images(const std::filesystem::path& file, bool ignored, const std::string& target) {
  HostTensor x(DType::f32, {96, 1, 8, 8}), y(DType::i64, {96});
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.mutable_data<float>()[i] = static_cast<float>((i * 7919) % 211) / 211;
  for (std::int64_t i = 0; i < 96; ++i) {
    y.mutable_data<std::int64_t>()[i] = (i * 5) % 10;
    if (ignored && (i % 2 == 0 || i % 7 == 0)) y.mutable_data<std::int64_t>()[i] = -100;
    if (ignored && i % 16 == 6) y.mutable_data<std::int64_t>()[i] = 3;
  }
  write_npz(file, {{"x", x}, {target, y}});
}

struct Split {
  const char *ranks, *batch, *accumulate;
};

/// Losses of six steps of 16 samples.
std::vector<double> losses(const Folder& folder, const std::string& model,
                           const std::vector<std::string>& options, const Split& split) {
  const std::string out = cat("run-", split.ranks, "-", split.batch, "-", split.accumulate);
  std::vector<std::string> words = {"train",
                                    model,
                                    "--data",
                                    "data.npz",
                                    "--no-shuffle",
                                    "--epochs",
                                    "1",
                                    "--quiet",
                                    "--optimizer",
                                    "sgd:momentum=0.9",
                                    "--lr",
                                    "0.3",
                                    "--nproc-per-node",
                                    split.ranks,
                                    "--batch-size",
                                    split.batch,
                                    "--accumulate",
                                    split.accumulate,
                                    "--out",
                                    out};
  words.insert(words.end(), options.begin(), options.end());
  const Outcome outcome = run(words, {.folder = folder.path()});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return metric(folder / out, "step", "loss");
}

void expect_equal_splits(const std::string& model, const std::vector<std::string>& options, bool ignored,
                         const std::string& target) {
  Folder folder;
  std::string file = model;
  if (!target.empty() && model.find("ir_version") != std::string::npos) {
    write_model(folder / "model.onnx", model);
    file = "model.onnx";
  }
  write_images(folder / "data.npz", ignored, target);
  const std::vector<double> whole = losses(folder, file, options, {"1", "16", "1"});
  ASSERT_EQ(whole.size(), 6U);
  EXPECT_NE(whole.back(), whole.front());
  for (const Split& split : {Split{"2", "8", "1"}, Split{"1", "4", "4"}, Split{"2", "4", "2"}}) {
    const std::vector<double> parts = losses(folder, file, options, split);
    ASSERT_EQ(parts.size(), whole.size()) << split.ranks << " ranks";
    for (std::size_t i = 0; i < whole.size(); ++i)
      EXPECT_NEAR(parts[i], whole[i], 1e-5 * whole[i])
          << split.ranks << " ranks x " << split.batch << " x " << split.accumulate << ", step " << i + 1;
  }
}

TEST(EqualSplits, OfAPlainLoss) { expect_equal_splits(model_file("digits_mlp.onnx"), {}, false, "y"); }

TEST(EqualSplits, OfALossWhoseCountDependsOnTheTargets) {
  expect_equal_splits(model_file("digits_mlp.onnx"), {"--loss", "cross_entropy:ignore_index=-100"}, true,
                      "y");
}

TEST(EqualSplits, OfALossInTheGraph) {
  expect_equal_splits(R"(
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N, 1, 8, 8] x, int64[N] t) => (float loss)
    <float[10, 64] w = {)" +
                          [] {
                            std::string values;
                            for (int i = 0; i < 640; ++i)
                              values +=
                                  cat(i > 0 ? ", " : "", static_cast<double>((i * 37) % 101 - 50) / 500);
                            return values;
                          }() +
                          R"(}>
    {
      f = Flatten (x)
      z = Gemm <transB = 1> (f, w)
      loss = SoftmaxCrossEntropyLoss (z, t)
    })",
                      {}, false, "t");
}

}  // namespace
}  // namespace onnxddp::testing

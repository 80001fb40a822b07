// Files as PyTorch's exporter writes them (tests/golden/exports): what check says, that they train, and that
// what comes out is the user's file for other programs too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "importer/dataset.h"
#include "tests/cli/program.h"
#include "tests/testing.h"

namespace onnxddp::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

fs::path export_file(const std::string& name) {
  return fs::path(ONNXDDP_SOURCE_DIR) / "tests" / "golden" / "exports" / name;
}

/// 64 rows of two easy classes as the exports want them.
void write_images(const fs::path& file, const std::string& input, std::int64_t channels = 1,
                  std::int64_t size = 8) {
  HostTensor x(DType::f32, {64, channels, size, size}), y(DType::i64, {64});
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.mutable_data<float>()[i] = static_cast<float>((i * 37) % 101) / 101;
  for (std::int64_t i = 0; i < 64; ++i) y.mutable_data<std::int64_t>()[i] = i % 2;
  write_npz(file, {{input, x}, {"label", y}});
}

TEST(Exports, CheckNamesEveryLossOfTrainingForm) {
  const Outcome outcome = run({"check", export_file("eval.onnx").string()});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string said = outcome.out + outcome.err;
  EXPECT_THAT(said, HasSubstr("exporter fixed the batch dimension at 1"));
  EXPECT_THAT(said, HasSubstr("FuseBatchNormIntoConv"));
  EXPECT_THAT(said, HasSubstr("dropout that an exporter removed cannot be seen in a file"));
  EXPECT_THAT(
      said,
      HasSubstr(
          R"(torch.onnx.export(model.train(), (x,), f, dynamo=True, optimize=False, external_data=False, dynamic_shapes=({0: torch.export.Dim("N")},)))"));
}

TEST(Exports, TheRecommendedCallKeepsBatchNormAndDropout) {
  const Outcome check = run({"check", export_file("train.onnx").string()});
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_THAT(check.out + check.err, Not(HasSubstr("warning")));
  const Outcome show = run({"show", export_file("train.onnx").string(), "--stage", "canonicalise"});
  EXPECT_LINES(show.out, {"BatchStats(", "BatchNormApply(", "RunningStats(", "Dropout("});
}

/// Trains, predicts with the result, and lets onnx and onnxruntime look at it.
void train_and_check(const fs::path& model, const std::string& input, const std::vector<std::string>& options,
                     std::int64_t channels = 1, std::int64_t size = 8) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  write_images(folder / "data.npz", input, channels, size);
  std::vector<std::string> words = {"train", model.string(), "--data", "data.npz", "--steps",
                                    "3",     "--out",        "run",    "--quiet"};
  words.insert(words.end(), options.begin(), options.end());
  const Outcome trained = run(words, here);
  ASSERT_EQ(trained.code, 0) << trained.err;
  const Outcome exported = run({"export", "run", "-o", "trained.onnx"}, here);
  ASSERT_EQ(exported.code, 0) << exported.err;
  const Outcome predicted =
      run({"predict", "trained.onnx", "--data", "data.npz", "--output", "outputs.npz"}, here);
  ASSERT_EQ(predicted.code, 0) << predicted.err;
  if (std::string(ONNXDDP_PYTHON).empty())
    GTEST_SKIP() << "no Python with onnx and onnxruntime here (scripts/deps.sh installs one)";
  const std::string command =
      cat("'", ONNXDDP_PYTHON, "' '", ONNXDDP_SOURCE_DIR, "/tests/cli/check_export.py' '", model.string(),
          "' '", (folder / "trained.onnx").string(), "' '", (folder / "data.npz").string(), "' '",
          (folder / "outputs.npz").string(), "' > '", (folder / "said").string(), "' 2>&1");
  EXPECT_EQ(std::system(command.c_str()), 0) << read_text(folder / "said");
}

TEST(Exports, AFixedBatchAndExternalDataTrainAtBatch32) {
  train_and_check(export_file("eval.onnx"), "x", {"--batch-size", "32"});
}
TEST(Exports, TheRecommendedFileTrainsAndStaysTheUsers) {
  train_and_check(export_file("train.onnx"), "x", {"--nproc-per-node", "2", "--batch-size", "16"});
}
TEST(Exports, TheDigitsModelTrainsAndStaysTheUsers) {
  train_and_check(model_file("digits_cnn.onnx"), "x",
                  {"--nproc-per-node", "2", "--batch-size", "16", "--sync-bn"});
}

TEST(ExportsFull, RealFilesOfBothExportersTrainAtOneAndTwoRanks) {
  const fs::path models = fs::path(ONNXDDP_SOURCE_DIR) / ".." / "shared" / "models";
  if (!fs::exists(models)) GTEST_SKIP() << "the exporters' files are not here";
  for (const char* ranks : {"1", "2"}) {
    for (const char* name : {"resnet20.onnx", "resnet20.legacy.onnx", "resnet20.eval.onnx"}) {
      SCOPED_TRACE(cat(name, " on ", ranks));
      train_and_check(models / name, "x", {"--nproc-per-node", ranks, "--batch-size", "16"}, 3, 32);
    }
  }
}

TEST(Golden, TheTrainingGraphOfTheDigitsModelOnTwoRanks) {
  const Outcome outcome =
      run({"show", model_file("digits_cnn.onnx"), "--stage", "optimizer", "--ranks", "2", "--sync-bn"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  expect_golden("digits_cnn.sync.graph", outcome.out);
  const Outcome local = run({"show", model_file("digits_cnn.onnx"), "--stage", "optimizer", "--ranks", "2"});
  ASSERT_EQ(local.code, 0) << local.err;
  EXPECT_LINES(local.out, {absent("AllGather"), "= AllReduce(", "AdamUpdate("});
  const Outcome plan =
      run({"show", model_file("digits_cnn.onnx"), "--stage", "plan", "--ranks", "2", "--sync-bn"});
  EXPECT_LINES(plan.out, {"plan digits_cnn N=32 device=cpu", "AllGather", "comm     AllReduce", "in place"});
}

}  // namespace
}  // namespace onnxddp::testing

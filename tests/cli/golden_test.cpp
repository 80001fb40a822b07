// Reference runs of PyTorch DistributedDataParallel, through the command line on two ranks (tests/golden/ddp/README.md).
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

namespace fs = std::filesystem;

double l2(double sum) { return std::sqrt(sum); }

/// Trains and compares every step's loss and the final state with the case's folder.
void replay(const std::string& name, const std::vector<std::string>& options) {
  Folder folder;
  const fs::path golden = fs::path(ONNXDDP_SOURCE_DIR) / "tests" / "golden" / "ddp" / name;
  const nlohmann::json recipe = nlohmann::json::parse(read_text(golden / "recipe.json")), expect = nlohmann::json::parse(read_text(golden / "expect.json"));
  std::vector<std::string> words = {"train", (golden / "model.onnx").string(), "--data", (golden / "data.npz").string(), "--nproc-per-node", cat(recipe.at("ranks").get<int>()),
                                    "--batch-size", cat(recipe.at("batch_size").get<int>()), "--epochs", cat(recipe.at("epochs").get<int>()), "--seed", cat(recipe.at("seed").get<int>()),
                                    "--lr", recipe.at("lr").dump(), "--loss", recipe.at("loss"), "--out", "run", "--quiet"};
  words.insert(words.end(), options.begin(), options.end());
  const Outcome outcome = run(words, {.folder = folder.path(), .seconds = 120});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<double> losses = metric(folder / "run", "step", "loss"), wanted = expect.at("loss");
  ASSERT_EQ(losses.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(losses[i], wanted[i], 1e-5 * std::abs(wanted[i])) << "step " << i + 1;
  const std::vector<double> rates = metric(folder / "run", "step", "lr"), wanted_rates = expect.at("lr");
  for (std::size_t i = 0; i < wanted_rates.size(); ++i) EXPECT_NEAR(rates[i], wanted_rates[i], 1e-9 * wanted_rates[i]) << "step " << i + 1;
  ASSERT_EQ(run({"export", "run", "-o", "final.npz"}, {.folder = folder.path()}).code, 0);
  double difference = 0, norm = 0;
  std::map<std::string, HostTensor> wanted_state = read_tensors(golden / "final.npz"), state = read_tensors(folder / "final.npz");
  for (const auto& [tensor, value] : wanted_state) {
    const auto found = state.find(tensor);
    ASSERT_NE(found, state.end()) << tensor;
    ASSERT_EQ(found->second.shape(), value.shape()) << tensor;
    for (std::int64_t i = 0; i < value.numel(); ++i) {
      const double d = found->second.as_double(i) - value.as_double(i);
      difference += d * d;
      norm += value.as_double(i) * value.as_double(i);
    }
  }
  EXPECT_LE(l2(difference), 1e-4 * l2(norm));
}

TEST(GoldenFull, Toy) { replay("toy", {"--optimizer", "sgd"}); }
TEST(GoldenFull, DigitsMlp) { replay("digits_mlp", {"--optimizer", "sgd:momentum=0.9,weight_decay=1e-4"}); }
TEST(GoldenFull, DigitsCnnWithSyncBatchNorm) {
  replay("digits_cnn_syncbn", {"--optimizer", "sgd:momentum=0.9,nesterov=true", "--schedule", "step:step_size=20,gamma=0.5", "--sync-bn"});
}

}  // namespace
}  // namespace onnxddp::testing

// Reference runs of PyTorch DistributedDataParallel, through the command line on two ranks
// (tests/golden/ddp/README.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "executor/train/ranks.h"
#include "executor/train/run_folder.h"
#include "executor/train/stepper.h"
#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

namespace fs = std::filesystem;

fs::path golden_folder(const std::string& name) {
  return fs::path(ONNXDDP_SOURCE_DIR) / "tests" / "golden" / "ddp" / name;
}

/// All tensors together within 1e-4, relative L2.
void expect_state(const std::map<std::string, HostTensor>& state,
                  const std::map<std::string, HostTensor>& wanted) {
  double difference = 0, norm = 0;
  for (const auto& [tensor, value] : wanted) {
    const auto found = state.find(tensor);
    ASSERT_NE(found, state.end()) << tensor;
    ASSERT_EQ(found->second.shape(), value.shape()) << tensor;
    for (std::int64_t i = 0; i < value.numel(); ++i) {
      const double d = found->second.as_double(i) - value.as_double(i);
      difference += d * d;
      norm += value.as_double(i) * value.as_double(i);
    }
  }
  EXPECT_LE(std::sqrt(difference), 1e-4 * std::sqrt(norm));
}

/// Trains and compares every step's loss and the final state with the case's folder.
void replay(const std::string& name, const std::vector<std::string>& options) {
  Folder folder;
  const fs::path golden = golden_folder(name);
  const nlohmann::json recipe = nlohmann::json::parse(read_text(golden / "recipe.json")),
                       expect = nlohmann::json::parse(read_text(golden / "expect.json"));
  std::vector<std::string> words = {"train",
                                    (golden / "model.onnx").string(),
                                    "--data",
                                    (golden / "data.npz").string(),
                                    "--nproc-per-node",
                                    cat(recipe.at("ranks").get<int>()),
                                    "--batch-size",
                                    cat(recipe.at("batch_size").get<int>()),
                                    "--epochs",
                                    cat(recipe.at("epochs").get<int>()),
                                    "--seed",
                                    cat(recipe.at("seed").get<int>()),
                                    "--lr",
                                    recipe.at("lr").dump(),
                                    "--loss",
                                    recipe.at("loss"),
                                    "--out",
                                    "run",
                                    "--quiet"};
  words.insert(words.end(), options.begin(), options.end());
  const Outcome outcome = run(words, {.folder = folder.path(), .seconds = 120});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<double> losses = metric(folder / "run", "step", "loss"), wanted = expect.at("loss");
  ASSERT_EQ(losses.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(losses[i], wanted[i], 1e-5 * std::abs(wanted[i])) << "step " << i + 1;
  const std::vector<double> rates = metric(folder / "run", "step", "lr"), wanted_rates = expect.at("lr");
  for (std::size_t i = 0; i < wanted_rates.size(); ++i)
    EXPECT_NEAR(rates[i], wanted_rates[i], 1e-9 * wanted_rates[i]) << "step " << i + 1;
  ASSERT_EQ(run({"export", "run", "-o", "final.npz"}, {.folder = folder.path()}).code, 0);
  expect_state(read_tensors(folder / "final.npz"), read_tensors(golden / "final.npz"));
}

TEST(GoldenFull, Toy) { replay("toy", {"--optimizer", "sgd"}); }
TEST(GoldenFull, DigitsMlp) { replay("digits_mlp", {"--optimizer", "sgd:momentum=0.9,weight_decay=1e-4"}); }
TEST(GoldenFull, DigitsCnnWithSyncBatchNorm) {
  replay("digits_cnn_syncbn", {"--optimizer", "sgd:momentum=0.9,nesterov=true", "--schedule",
                               "step:step_size=20,gamma=0.5", "--sync-bn"});
}

/// One rank with the union of the two ranks' batches, in the recorded order, computes what two ranks with
/// synchronised batch norm do.
TEST(GoldenFull, UnionBatchOnOneRank) {
  const fs::path golden = golden_folder("digits_cnn_syncbn");
  const nlohmann::json expect = nlohmann::json::parse(read_text(golden / "expect.json"));
  Options options;
  options.model = (golden / "model.onnx").string();
  options.data = {(golden / "data.npz").string()};
  options.loss = "cross_entropy";
  options.optimizer = "sgd:momentum=0.9,nesterov=true";
  const TrainSetup setup = prepare_training(options, 0, 1);
  const std::unique_ptr<Device> device = make_cpu_device(1);
  RankGroup alone(std::nullopt, std::chrono::seconds(60));
  Session session(*device, alone.communicator());
  Stepper stepper(setup, session, alone.communicator());
  std::size_t step = 0;
  for (const auto& epoch : expect.at("order")) {
    const std::vector<std::int64_t> first = epoch.at(0), second = epoch.at(1);
    for (std::size_t begin = 0; begin < first.size(); begin += 32, ++step) {
      const std::size_t end = std::min(begin + 32, first.size());
      std::vector<std::int64_t> rows(first.begin() + static_cast<std::ptrdiff_t>(begin),
                                     first.begin() + static_cast<std::ptrdiff_t>(end));
      rows.insert(rows.end(), second.begin() + static_cast<std::ptrdiff_t>(begin),
                  second.begin() + static_cast<std::ptrdiff_t>(end));
      const Batch batch{0, 0, static_cast<std::int64_t>(rows.size()), setup.data->batch(rows)};
      const double wanted = expect.at("loss").at(step),
                   loss = stepper.run({&batch, 1}, static_cast<std::int64_t>(step), expect.at("lr").at(step))
                              .loss;
      EXPECT_NEAR(loss, wanted, 1e-5 * wanted) << "step " << step + 1;
    }
  }
  EXPECT_EQ(step, expect.at("loss").size());
  expect_state(model_values(session, setup.model), read_tensors(golden / "final.npz"));
}

}  // namespace
}  // namespace onnxddp::testing

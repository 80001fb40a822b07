// A run that was stopped and resumed is the run that was never stopped, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::vector<std::string> digits(const std::string& out, std::vector<std::string> more) {
  std::vector<std::string> words = {
      "train", model_file("digits_mlp.onnx"), "--data", model_file("digits.npz"), "--out", out, "--quiet"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void expect_same_run(const fs::path& a, const fs::path& b) {
  EXPECT_EQ(metric(a, "step", "loss"), metric(b, "step", "loss"));
  EXPECT_EQ(metric(a, "step", "lr"), metric(b, "step", "lr"));
  EXPECT_EQ(metric(a, "step", "samples"), metric(b, "step", "samples"));
  EXPECT_EQ(read_text(a / "model.onnx"), read_text(b / "model.onnx"));
}

/// Trains to step 60 at once, and to 37 (within the second epoch's end), then on to 60.
void stop_and_go(const std::string& ranks) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const std::vector<std::string> common = {"--optimizer", "adam", "--nproc-per-node", ranks, "--seed", "3",
                                           "--lr",        "0.01"};
  auto all = common, first = common;
  all.insert(all.end(), {"--steps", "60"});
  first.insert(first.end(), {"--steps", "37"});
  ASSERT_EQ(run(digits("whole", all), here).code, 0);
  ASSERT_EQ(run(digits("parts", first), here).code, 0);
  const Outcome second = run(
      {"train", model_file("digits_mlp.onnx"), "--out", "parts", "--resume", "auto", "--steps", "60"}, here);
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_THAT(second.err, HasSubstr("resumed at epoch"));
  EXPECT_THAT(second.err, HasSubstr("steps was 37, now 60"));
  expect_same_run(folder / "whole", folder / "parts");
}

TEST(Resume, ContinuesBitForBitOnOneRank) { stop_and_go("1"); }
TEST(Resume, ContinuesBitForBitOnTwoRanks) { stop_and_go("2"); }

/// The run's folder alone: MODEL is neither named nor there any more.
void resume_without_model(const std::string& ranks) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  fs::copy_file(model_file("digits_cnn.onnx"), folder / "m.onnx");
  const std::vector<std::string> common = {
      "train", "m.onnx", "--data", model_file("digits.npz"), "--nproc-per-node", ranks, "--quiet"};
  auto whole = common, parts = common;
  whole.insert(whole.end(), {"--steps", "12", "--out", "whole"});
  parts.insert(parts.end(), {"--steps", "7", "--out", "parts"});
  ASSERT_EQ(run(whole, here).code, 0);
  ASSERT_EQ(run(parts, here).code, 0);
  fs::remove(folder / "m.onnx");
  const Outcome second = run({"train", "--resume", "parts", "--steps", "12"}, here);
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_THAT(second.err, HasSubstr("'m.onnx' is gone: the model is the copy in the checkpoint of step 7"));
  expect_same_run(folder / "whole", folder / "parts");
}

TEST(Resume, NeedsNothingButTheRun) { resume_without_model("1"); }
TEST(Resume, NeedsNothingButTheRunOnTwoRanks) { resume_without_model("2"); }

TEST(Resume, AutoNeedsAModelOrAFolder) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  expect_error(run({"train", "--resume", "auto"}, here), 2, "train needs MODEL");
  expect_error(run({"train", "--resume", "auto", "--out", "none"}, here), 2, "'none' holds no run");
}

TEST(Resume, ContinuesAfterAKill) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const std::vector<std::string> options = {"--epochs", "6",           "--save-every",
                                            "10",       "--optimizer", "sgd:momentum=0.9"};
  ASSERT_EQ(run(digits("whole", options), here).code, 0);
  {
    auto slow = options;
    slow.insert(slow.end(), {"--keep", "100"});  // the one that is waited for stays
    Child child(digits("killed", slow), here);
    ASSERT_TRUE(eventually([&] { return fs::exists(folder / "killed" / "checkpoints" / "step-00000020"); }));
    child.signal(SIGKILL);
  }
  const Outcome resumed =
      run(digits("killed", {"--resume", "auto", "--epochs", "6", "--optimizer", "sgd:momentum=0.9"}), here);
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  expect_same_run(folder / "whole", folder / "killed");
}

TEST(Resume, SaysThatARunIsFinished) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run({"train", model_file("toy.onnx"), "--quiet"}, here).code, 0);
  const Outcome again = run({"train", model_file("toy.onnx"), "--resume", "auto"}, here);
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("finished"));
  const Outcome longer = run({"train", model_file("toy.onnx"), "--resume", "auto", "--epochs", "12"}, here);
  EXPECT_EQ(longer.code, 0) << longer.err;
  EXPECT_EQ(metric(folder / "runs" / "toy-1", "step", "step").size(), 12U);
}

TEST(Resume, ChangesNothingOfAFinishedRun) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run({"train", model_file("toy.onnx"), "--out", "r", "--quiet"}, here).code, 0);
  const auto content = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder / "r"))
      if (entry.is_regular_file() && entry.path().filename() != ".lock")  // holds a pid
        files[entry.path().string()] = read_text(entry.path());
    return files;
  };
  const auto before = content();
  const Outcome again =
      run({"train", model_file("toy.onnx"), "--out", "r", "--resume", "auto", "--lr", "0.5"}, here);
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.err, HasSubstr("finished"));
  EXPECT_THAT(again.err, ::testing::Not(HasSubstr("0.5")));
  EXPECT_EQ(before, content());
  const Outcome more = run(
      {"train", model_file("toy.onnx"), "--out", "r", "--resume", "auto", "--lr", "0.5", "--epochs", "12"},
      here);
  EXPECT_THAT(more.err, HasSubstr("lr was 0.001, now 0.5"));
  EXPECT_THAT(read_text(folder / "r" / "run.toml"), HasSubstr("lr = 0.5\n"));
}

TEST(Resume, RefusesAnotherModel) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const std::string toy = model_file("toy.onnx"), digits_mlp = model_file("digits_mlp.onnx");
  ASSERT_EQ(run({"train", toy, "--out", "r", "--quiet"}, here).code, 0);
  expect_error(run({"train", digits_mlp, "--resume", "r", "--lr", "0.5"}, here), 2,
               "'r' was trained from '" + toy + "', not '" + digits_mlp + "'");
  fs::copy_file(toy, folder / "copy.onnx");
  EXPECT_EQ(run({"train", "copy.onnx", "--resume", "r", "--quiet"}, here).code, 0);
}

TEST(Resume, StartsWhereThereIsNothing) {
  Folder folder;
  const Outcome outcome =
      run({"train", model_file("toy.onnx"), "--resume", "auto", "--out", "new"}, {.folder = folder.path()});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("starting from the beginning"));
  expect_error(run({"train", model_file("toy.onnx"), "--resume", "nowhere"}, {.folder = folder.path()}), 2,
               "nowhere");
}

TEST(Resume, SkipsADamagedCheckpoint) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run(digits("whole", {"--steps", "30"}), here).code, 0);
  ASSERT_EQ(run(digits("r", {"--steps", "20", "--save-every", "10"}), here).code, 0);
  const fs::path state = folder / "r" / "checkpoints" / "step-00000020" / "state.onnx";
  const std::string bytes = read_text(state);
  write_text(state, bytes.substr(0, bytes.size() - 7));
  const Outcome outcome =
      run({"train", model_file("digits_mlp.onnx"), "--out", "r", "--resume", "auto", "--steps", "30"}, here);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("step-00000020"));
  expect_same_run(folder / "whole", folder / "r");
}

TEST(Resume, TakesTheCheckpointThatIsNamed) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run(digits("r", {"--steps", "20", "--save-every", "10"}), here).code, 0);
  const Outcome outcome =
      run({"train", model_file("digits_mlp.onnx"), "--resume", "r/checkpoints/step-00000010"}, here);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("step 11 of 20"));
  EXPECT_EQ(metric(folder / "r", "step", "step").size(), 20U);
}

TEST(Resume, RefusesAnotherRun) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  ASSERT_EQ(run(digits("r", {"--steps", "5"}), here).code, 0);
  expect_error(run(digits("r", {"--resume", "auto", "--steps", "9", "--batch-size", "16"}), here), 2,
               "batch-size");
  expect_error(run(digits("r", {"--resume", "auto", "--steps", "9", "--seed", "1"}), here), 2, "seed");
  const Outcome ranks = run(digits("r", {"--resume", "auto", "--steps", "9", "--nproc-per-node", "2"}), here);
  EXPECT_EQ(ranks.code, 2) << ranks.err;
  EXPECT_THAT(ranks.err, HasSubstr("nproc-per-node"));
  EXPECT_THAT(ranks.err, ::testing::Not(HasSubstr("nproc-per-node was")));
}

void stop_by(int signal, int code, const std::string& ranks) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const std::vector<std::string> options = {"--steps", "4000000",          "--save-every",
                                            "1000000", "--nproc-per-node", ranks};
  Child child(digits("r", options), here);
  ASSERT_TRUE(eventually([&] {
    return fs::exists(folder / "r" / "metrics.jsonl") && !read_text(folder / "r" / "metrics.jsonl").empty();
  }));
  child.signal(signal);
  const Outcome outcome = child.wait();
  EXPECT_EQ(outcome.code, code) << outcome.err;
  const nlohmann::json summary = nlohmann::json::parse(read_text(folder / "r" / "summary.json"));
  EXPECT_EQ(summary.at("completed"), false);
  const std::int64_t steps = summary.at("steps");
  EXPECT_GT(steps, 0);
  EXPECT_TRUE(fs::exists(folder / "r" / "last.onnx"));
  EXPECT_FALSE(fs::exists(folder / "r" / "model.onnx"));
  // The same number of steps at once gives the same model, and the stopped run goes on from there.
  ASSERT_EQ(run(digits("same", {"--steps", cat(steps), "--nproc-per-node", ranks}), here).code, 0);
  EXPECT_EQ(read_text(folder / "same" / "last.onnx"), read_text(folder / "r" / "last.onnx"));
  EXPECT_EQ(run(digits("r", {"--resume", "auto", "--steps", cat(steps + 3)}), here).code, 0);
}

TEST(Signals, TermSavesAndEndsWell) { stop_by(SIGTERM, 0, "1"); }
TEST(Signals, Usr1SavesAndEndsWell) { stop_by(SIGUSR1, 0, "1"); }
TEST(Signals, InterruptSavesAndSaysSo) { stop_by(SIGINT, 130, "1"); }
TEST(Signals, TermStopsAllRanksAtOneStep) { stop_by(SIGTERM, 0, "2"); }
TEST(Signals, InterruptStopsAllRanksAtOneStep) { stop_by(SIGINT, 130, "2"); }

}  // namespace
}  // namespace onnxddp::testing

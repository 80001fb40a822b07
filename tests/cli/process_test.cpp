// Ranks and launcher as processes: a death leaves nobody behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/cli/program.h"

namespace onnxddp::testing {
namespace {

using ::testing::HasSubstr;

class Processes : public ::testing::Test {
 protected:
  void start() {
    mark_ = (folder_ / "marked-run").string();
    child_ = std::make_unique<Child>(
        std::vector<std::string>{"train", model_file("digits_mlp.onnx"), "--data", model_file("digits.npz"),
                                 "--out", mark_, "--steps", "100000000", "--save-every", "100000000",
                                 "--nproc-per-node", "3", "--threads", "1"},
        RunOptions{.folder = folder_.path(), .seconds = 40});
    ASSERT_TRUE(eventually([&] { return !read_text(mark_ + "/metrics.jsonl").empty(); })) << child_->errors();
    ranks_ = processes_with(mark_);
    std::erase(ranks_, child_->pid());
    ASSERT_EQ(ranks_.size(), 3U);
  }
  bool nobody_left() {
    return eventually([&] { return processes_with(mark_).empty(); }, 5);
  }

  Folder folder_;
  std::string mark_;
  std::unique_ptr<Child> child_;
  std::vector<int> ranks_;
};

TEST_F(Processes, AKilledRankEndsAll) {
  start();
  kill(ranks_[1], SIGKILL);
  const Outcome outcome = child_->wait();
  EXPECT_FALSE(outcome.late);
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("SIGKILL"));
  EXPECT_THAT(outcome.err, HasSubstr("rank "));
  EXPECT_TRUE(nobody_left());
}

TEST_F(Processes, ACrashedRankIsNamed) {
  start();
  kill(ranks_[2], SIGABRT);  // sanitizers catch SIGSEGV
  const Outcome outcome = child_->wait();
  EXPECT_FALSE(outcome.late);
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("SIGABRT"));
  EXPECT_TRUE(nobody_left());
}

TEST_F(Processes, AKilledLauncherLeavesNobody) {
  start();
  child_->signal(SIGKILL);
  child_->wait();
  EXPECT_TRUE(nobody_left());
}

TEST_F(Processes, TheSecondInterruptEndsAtOnce) {
  start();
  for (const int rank : ranks_) kill(rank, SIGSTOP);
  child_->signal(SIGINT);
  EXPECT_FALSE(eventually([&] { return !child_->running(); }, 0.5));
  child_->signal(SIGINT);
  const Outcome outcome = child_->wait();
  EXPECT_FALSE(outcome.late);
  EXPECT_NE(outcome.code, 0);
  EXPECT_TRUE(nobody_left());
}

TEST_F(Processes, AHangUpSavesAndEnds) {
  start();
  child_->signal(SIGHUP);
  const Outcome outcome = child_->wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(read_text(mark_ + "/summary.json"), HasSubstr("asked to stop"));
  EXPECT_TRUE(nobody_left());
}

TEST(Agreement, TwoRunsShareAMachine) {
  Folder folder;
  const RunOptions here{.folder = folder.path()};
  const auto words = [](const std::string& out) {
    return std::vector<std::string>{"train",
                                    model_file("digits_mlp.onnx"),
                                    "--data",
                                    model_file("digits.npz"),
                                    "--out",
                                    out,
                                    "--epochs",
                                    "1",
                                    "--nproc-per-node",
                                    "2",
                                    "--quiet"};
  };
  Child a(words("a"), here), b(words("b"), here);
  EXPECT_EQ(a.wait().code, 0);
  EXPECT_EQ(b.wait().code, 0);
  EXPECT_EQ(read_text(folder / "a" / "model.onnx"), read_text(folder / "b" / "model.onnx"));
}

}  // namespace
}  // namespace onnxddp::testing

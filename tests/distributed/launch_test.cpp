#include "distributed/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/distributed/processes.h"

namespace onnxddp {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

TestJob launcher(const std::string& scenario, int nproc) {
  return TestJob({"launcher", scenario, std::to_string(nproc)});
}

TEST(Launch, PrefixesTheOutputOfOtherRanks) {
  auto job = launcher("hello", 3);
  EXPECT_EQ(job.wait(), 0) << job.err();
  const std::string out = job.out();
  EXPECT_THAT(out, HasSubstr("hello from 0 of 3, local 0\n"));
  EXPECT_THAT(out, HasSubstr("[rank 1] hello from 1 of 3, local 1\n"));
  EXPECT_THAT(out, HasSubstr("[rank 2] second line\n"));
  EXPECT_THAT(out, Not(HasSubstr("[rank 0]")));
  EXPECT_THAT(out, Not(HasSubstr("still set")));
  EXPECT_THAT(job.err(), HasSubstr("[rank 1] no newline\n"));
}

// Over both back ends for processes.
class LaunchedRanks : public testing::TestWithParam<const char*> {
 protected:
  TestJob launcher(const std::string& scenario, int nproc) {
    return onnxddp::launcher(scenario + "/" + GetParam(), nproc);
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, LaunchedRanks, testing::Values("shm", "gloo"),
                         [](const auto& test) { return test.param; });

TEST_P(LaunchedRanks, MeetAndReduce) {
  auto job = launcher("sum", 3);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank 2] sum 6\n"));
  EXPECT_EQ(job.err(), "");
}

TEST(Launch, WritesLogs) {
  std::string folder = testing::TempDir() + "onnxddp-log-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  TestJob job({"launcher", "hello", "2", folder + "/log"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  std::ifstream out(folder + "/log/rank-1.out"), err(folder + "/log/rank-0.err");
  std::string line;
  std::getline(out, line);
  EXPECT_EQ(line, "hello from 1 of 2, local 1");
  std::getline(err, line);
  EXPECT_EQ(line, "no newline");
  EXPECT_THAT(job.out(), HasSubstr("hello from 0 of 2, local 0\nsecond line\n"));
  std::filesystem::remove_all(folder);
}

TEST_P(LaunchedRanks, PassOnTheCodeOfTheOneThatFailedFirst) {
  auto job = launcher("one-fails", 3);
  EXPECT_EQ(job.wait(), kExitUserError);
  EXPECT_THAT(job.err(), HasSubstr("row 7 is not a number"));
  EXPECT_THAT(job.err(), HasSubstr("rank 1 exited with code 1; its last sign of life was at step 5 after "
                                   "AllReduce (collective 4); rank 0 waited at step 5"));
  EXPECT_THAT(job.err(), testing::ContainsRegex("onnx-ddp: rank 1 \\(pid [0-9]+\\) exited with code 1\n$"));
  EXPECT_TRUE(job.gone_within(milliseconds(100)));

  EXPECT_EQ(launcher("one-diverges", 2).wait(), kExitDiverged);
}

TEST(Launch, MapsCodesOutsideTheListToInternal) {
  EXPECT_EQ(launcher("one-exits-9", 2).wait(), kExitInternal);
}

TEST_P(LaunchedRanks, AreNamedWhenKilled) {
  auto job = launcher("long", 3);
  ASSERT_TRUE(job.wait_for("step 30\n")) << job.err();
  const long victim = job.number_after("[rank 1] rank 1 pid ");
  ASSERT_GT(victim, 0);
  ASSERT_EQ(::kill(static_cast<pid_t>(victim), SIGKILL), 0);
  EXPECT_TRUE(job.gone_within(milliseconds(2'000)));
  EXPECT_EQ(job.wait(), kExitPeer);
  EXPECT_THAT(job.err(),
              HasSubstr("error: rank 1 was killed by SIGKILL; its last sign of life was at step "));
  EXPECT_THAT(job.err(), HasSubstr("[rank 2] error: rank 1 was killed by SIGKILL"));
  EXPECT_THAT(job.err(), HasSubstr("; rank 0 waited at step "));
  EXPECT_THAT(job.err(), HasSubstr(cat("onnx-ddp: rank 1 (pid ", victim, ") was killed by SIGKILL\n")));
}

TEST_P(LaunchedRanks, DieWithTheLauncher) {
  auto job = launcher("long", 3);
  ASSERT_TRUE(job.wait_for("step 3\n")) << job.err();
  EXPECT_EQ(job.living().size(), 4u);
  ASSERT_EQ(::kill(job.pid(), SIGKILL), 0);
  EXPECT_TRUE(job.gone_within(milliseconds(2'000)));
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
}

TEST(Launch, AKilledLauncherDuringStartLeavesNoProcess) {
  for (int delay : {0, 5, 20, 60}) {
    auto job = launcher("long", 3);
    std::this_thread::sleep_for(milliseconds(delay));
    ASSERT_EQ(::kill(job.pid(), SIGKILL), 0);
    job.wait();
    EXPECT_TRUE(job.gone_within(milliseconds(2'000))) << delay;
  }
}

TEST_P(LaunchedRanks, AreNamedWhenHanging) {
  auto job = launcher("one-hangs", 2);
  EXPECT_EQ(job.wait(), kExitPeer);
  EXPECT_THAT(
      job.err(),
      HasSubstr(
          "error: rank 1 is alive, but has not arrived; it stopped at step 5 after AllReduce (collective 4); "
          "rank 0 waited at step 5 in AllReduce (collective 5)"));
}

TEST_P(LaunchedRanks, AreNamedWhenStopped) {
  auto job = launcher("one-stops", 2);
  EXPECT_EQ(job.wait(), kExitPeer);
  EXPECT_THAT(job.err(), HasSubstr("error: rank 1 gives no sign of life; it stopped "));
  EXPECT_TRUE(job.gone_within(milliseconds(100)));
}

TEST(Launch, ForwardsSigtermAndEndsWell) {
  auto job = launcher("saves-on-sigterm", 2);
  ASSERT_TRUE(job.wait_for("[rank 1] rank 1 ready\n"));
  ASSERT_TRUE(job.wait_for("rank 0 ready\n"));
  ::kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank 1] saved\n"));
}

TEST(Launch, KillsRanksThatDoNotEndAfterAFailure) {
  auto job = launcher("ignores-signals", 2);
  EXPECT_EQ(job.wait(), kExitUserError);
  EXPECT_THAT(job.err(), HasSubstr("rank 0 gives up"));
  EXPECT_TRUE(job.gone_within(milliseconds(100)));
}

TEST(Launch, TheSecondInterruptKills) {
  auto job = launcher("ignores-interrupts", 2);
  ASSERT_TRUE(job.wait_for("[rank 1] rank 1 ready\n"));
  ASSERT_TRUE(job.wait_for("rank 0 ready\n"));
  ::kill(job.pid(), SIGINT);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(job.living().size(), 3u);
  ::kill(job.pid(), SIGINT);
  EXPECT_EQ(job.wait(milliseconds(2'000)), kExitInterrupted);
  EXPECT_TRUE(job.gone_within(milliseconds(100)));
}

TEST(Launch, RanksThatDisagreeSayWhere) {
  auto job = launcher("disagree", 2);
  EXPECT_EQ(job.wait(), kExitUserError);
  EXPECT_THAT(job.err(), HasSubstr("rank 1 has another graph than rank 0, first in line 2"));
}

TEST(Launch, RefusesAProgramThatCannotRun) {
  LaunchOptions options;
  options.command = {"/no/such/program"};
  EXPECT_THROW(launch(options), Error);
}

constexpr const char* kVariables[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};

// A launcher's variables for one test.
class Environment {
 public:
  Environment(std::initializer_list<std::pair<const char*, const char*>> values) {
    clear();
    for (const auto& [name, value] : values) ::setenv(name, value, 1);
  }
  ~Environment() { clear(); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static void clear() {
    for (const char* name : kVariables) ::unsetenv(name);
  }
};

std::string message_of_environment() {
  try {
    rank_from_environment();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), kExitUsage);
    return error.what();
  }
  return "";
}

TEST(RankFromEnvironment, IsNothingWithoutALauncher) {
  const Environment none{};
  EXPECT_FALSE(rank_from_environment().has_value());
  const Environment unrelated{{"MASTER_ADDR", "10.0.0.1"}};
  EXPECT_FALSE(rank_from_environment().has_value());
}

TEST(RankFromEnvironment, ReadsTorchrunsVariables) {
  const Environment set{{"RANK", "5"},
                        {"WORLD_SIZE", "8"},
                        {"LOCAL_RANK", "1"},
                        {"LOCAL_WORLD_SIZE", "4"},
                        {"MASTER_ADDR", "10.0.0.7"},
                        {"MASTER_PORT", "29500"}};
  const auto info = rank_from_environment();
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->rank, 5);
  EXPECT_EQ(info->world_size, 8);
  EXPECT_EQ(info->local_rank, 1);
  EXPECT_EQ(info->local_world_size, 4);
  EXPECT_EQ(info->master_addr, "10.0.0.7");
  EXPECT_EQ(info->master_port, 29500);
  EXPECT_EQ(info->lifeline, -1);
}

TEST(RankFromEnvironment, NamesWhatIsMissingOrWrong) {
  {
    const Environment set{{"RANK", "0"}};
    EXPECT_EQ(message_of_environment(), "environment variable WORLD_SIZE expected, but not set");
  }
  {
    const Environment set{{"WORLD_SIZE", "2"}};
    EXPECT_EQ(message_of_environment(), "environment variable RANK expected, but not set");
  }
  {
    const Environment set{{"RANK", "2"}, {"WORLD_SIZE", "2"}};
    EXPECT_EQ(message_of_environment(), "environment variable RANK is '2', expected a number from 0 to 1");
  }
  {
    const Environment set{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}};
    EXPECT_EQ(message_of_environment(), "environment variable MASTER_PORT expected, but not set");
  }
}

TEST(JoinJob, RankZeroServesTheStoreUnderAForeignLauncher) {
  std::uint16_t port;
  { port = StoreServer("127.0.0.1", 0, "").port(); }
  RankInfo info;
  info.world_size = 2;
  info.master_port = port;
  const Job zero = join_job(info, milliseconds(5'000));
  info.rank = 1;
  const Job one = join_job(info, milliseconds(5'000));
  ASSERT_NE(zero.server, nullptr);
  EXPECT_EQ(one.server, nullptr);
  zero.store->set("a", "b");
  EXPECT_EQ(one.store->get("a", milliseconds(1'000)), "b");
  EXPECT_EQ(one.host, "127.0.0.1");
}

}  // namespace
}  // namespace onnxddp

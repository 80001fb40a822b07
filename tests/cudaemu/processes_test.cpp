#include "tests/cudaemu/processes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>

namespace cudaemu_test {
namespace {

struct Child {
  pid_t pid = 0;
  int errors = -1;
};

[[noreturn]] void run_child(int rank, const std::function<void(int)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int code = 0;
  try {
    body(rank);
    if (!cudaemu::take_reports().empty()) code = cudaemu::kFaultReports;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: exception: %s\n", rank, e.what());
    code = 1;
  }
  std::fflush(nullptr);
  _exit(code);
}

Child start(int rank, const std::function<void(int)>& body) {
  int ends[2];
  require(pipe2(ends, O_CLOEXEC) == 0, "pipe");
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    run_child(rank, body);
  }
  close(ends[1]);
  return {pid, ends[0]};
}

// Reads until the end of the pipe or the deadline; then the child is killed.
Outcome finish(const Child& child, std::chrono::steady_clock::time_point deadline) {
  Outcome out;
  char buffer[4096];
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd wait = {child.errors, POLLIN, 0};
    if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) == 0) {
      out.timed_out = true;
      kill(child.pid, SIGKILL);
      break;
    }
    const ssize_t n = read(child.errors, buffer, sizeof buffer);
    if (n <= 0) break;
    out.errors.append(buffer, static_cast<size_t>(n));
  }
  close(child.errors);
  int status = 0;
  waitpid(child.pid, &status, 0);
  if (WIFEXITED(status)) out.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) out.signal = WTERMSIG(status);
  return out;
}

}  // namespace

std::vector<Outcome> run_processes(int count, const std::function<void(int)>& body, double seconds) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int>(seconds * 1000));
  std::vector<Child> children;
  for (int rank = 0; rank < count; ++rank) children.push_back(start(rank, body));
  std::vector<Outcome> out;
  for (const Child& child : children) out.push_back(finish(child, deadline));
  return out;
}

Outcome run_process(const std::function<void()>& body, double seconds) {
  return run_processes(
             1, [&](int) { body(); }, seconds)
      .front();
}

void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

namespace {

TEST(Processes, TellHowTheyEnd) {
  EXPECT_EQ(run_process([] {}).exit_code, 0);
  EXPECT_EQ(run_process([] { _exit(7); }).exit_code, 7);
  EXPECT_EQ(run_process([] { raise(SIGTERM); }).signal, SIGTERM);
  const Outcome thrown = run_process([] { require(false, "what was wrong"); });
  EXPECT_EQ(thrown.exit_code, 1);
  EXPECT_NE(thrown.errors.find("what was wrong"), std::string::npos);
}

TEST(Processes, AreKilledAtTheDeadline) {
  const Outcome stuck = run_process([] { pause(); }, 0.1);
  EXPECT_TRUE(stuck.timed_out);
  EXPECT_EQ(stuck.signal, SIGKILL);
}

}  // namespace
}  // namespace cudaemu_test

// Jobs of real processes for the tests: this test program plays launcher and ranks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace onnxddp {

/// A started program whose output goes to files. It is the first of a session of its own, is killed by an
/// alarm after 60 s and, with everything in its session, at the latest by the destructor.
class TestJob {
 public:
  /// Starts this test program in another role.
  explicit TestJob(const std::vector<std::string>& role);
  ~TestJob();
  TestJob(const TestJob&) = delete;
  TestJob& operator=(const TestJob&) = delete;

  pid_t pid() const { return pid_; }
  /// Exit code, or 128 + signal. Fails the test after `limit`.
  int wait(std::chrono::milliseconds limit = std::chrono::seconds(30));
  std::string out() const;
  std::string err() const;
  /// Waits until standard output has `text`; false after 20 s.
  bool wait_for(const std::string& text) const;
  /// The number behind `text` in standard output.
  long number_after(const std::string& text) const;
  /// Living processes of the session.
  std::vector<pid_t> living() const;
  /// Waits until no process is left; false after `limit`.
  bool gone_within(std::chrono::milliseconds limit) const;

 private:
  pid_t pid_ = -1;
  bool reaped_ = false;
  std::string folder_;
};

/// "launcher SCENARIO[/BACKEND] NPROC [LOG_DIR]" or "rank SCENARIO[/BACKEND]": the exit code of the program.
int play_role(const std::vector<std::string>& role);

}  // namespace onnxddp

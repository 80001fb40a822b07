// Runs pieces of a test in child processes, with a watchdog: a fault of the emulator ends the process that it
// is in.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tests/cudaemu/control.h"

namespace cudaemu_test {

struct Outcome {
  int exit_code = -1;  ///< of exit, or -1
  int signal = 0;      ///< that ended it, or 0
  bool timed_out = false;
  std::string errors;  ///< what it wrote to standard error
};

/// Runs body(rank) in `count` child processes at once and waits for all, at most `seconds`. A child exits
/// with 0, with cudaemu::kFaultReports if it leaves findings behind, or with 1 if the body throws.
std::vector<Outcome> run_processes(int count, const std::function<void(int)>& body, double seconds = 60);

/// One child.
Outcome run_process(const std::function<void()>& body, double seconds = 60);

/// Throws if the condition is false; for use in child processes.
void require(bool condition, const std::string& what);

}  // namespace cudaemu_test

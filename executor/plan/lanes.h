// Execution of a plan's steps: the caller's thread for compute, one thread of a rank's own for collectives.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "executor/kernel.h"
#include "executor/plan/plan.h"

namespace onnxddp {

/// A step with everything that it needs at hand.
struct Call {
  const Run* run = nullptr;
  RunContext context{};
  const Step* step = nullptr;
  int number = 0;        // of the step in the plan
  int wait = -1;         // step of the other thread that must be finished before
  bool awaited = false;  // whether a step of the other thread waits for this one
};

/// Runs lists of calls. An exception on either thread stops both after the step they are in.
class Lanes {
 public:
  /// A failing compute thread aborts the collectives of `communicator`, which peers might keep waiting.
  explicit Lanes(Communicator& communicator) : communicator_(communicator) {}
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  /// Runs `mine` on this thread and, if there are any, `collectives` on the comm thread, which is started
  /// when it is first needed; returns when both are through. Rethrows the first exception, with the step as
  /// its place.
  void run(const std::vector<Call>& mine, const std::vector<Call>& collectives);

 private:
  using Progress = std::atomic<int>;
  void work();
  /// Runs calls until the end, an exception, or until the other thread has failed.
  void run_calls(const std::vector<Call>& calls, Progress& own, Progress& other);
  /// Waits until the other thread has finished step `number`; false if it has failed.
  bool await(const Progress& progress, int number) const;
  /// Lets go whoever waits for this thread.
  void fail(Progress& own);

  Communicator& communicator_;
  const std::vector<Call>* job_ = nullptr;  // valid while a job runs
  Progress mine_{-1}, comm_{-1};            // last finished step that was awaited
  std::atomic<bool> failed_{false}, quit_{false};
  std::atomic<int> started_{0}, finished_{0};  // jobs of the comm thread
  std::exception_ptr comm_error_;
  std::thread thread_;
};

}  // namespace onnxddp

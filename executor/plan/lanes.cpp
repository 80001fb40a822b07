#include "executor/plan/lanes.h"

#include <limits>

#include "distributed/communicator.h"

namespace onnxddp {
namespace {

constexpr int kEnd = std::numeric_limits<int>::max();

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Waits until `value` is at least `wanted`: a microsecond or two on the CPU, then asleep.
void wait_for(const std::atomic<int>& value, int wanted) {
  for (int spin = 0; spin < 64; ++spin) {
    if (value.load(std::memory_order_acquire) >= wanted) return;
    pause();
  }
  for (int seen = value.load(std::memory_order_acquire); seen < wanted;
       seen = value.load(std::memory_order_acquire))
    value.wait(seen, std::memory_order_acquire);
}

void set(std::atomic<int>& value, int to) {
  value.store(to, std::memory_order_release);
  value.notify_all();
}

}  // namespace

Lanes::~Lanes() {
  if (!thread_.joinable()) return;
  quit_.store(true);
  set(started_, started_.load() + 1);
  thread_.join();
}

bool Lanes::await(const Progress& progress, int number) const {
  wait_for(progress, number);
  return !failed_.load(std::memory_order_acquire);
}

void Lanes::fail(Progress& own) {
  failed_.store(true, std::memory_order_release);
  set(own, kEnd);
}

void Lanes::run_calls(const std::vector<Call>& calls, Progress& own, Progress& other) {
  const Call* call = calls.data();
  try {
    for (const Call* end = call + calls.size(); call != end; ++call) {
      if (call->wait >= 0 && !await(other, call->wait)) return;
      (*call->run)(call->context);
      if (call->awaited) set(own, call->number);
    }
  } catch (Error& error) {
    fail(own);
    error.add_in(call->step->origin);
    throw;
  } catch (...) {
    fail(own);
    throw;
  }
}

void Lanes::work() {
  for (int job = 1;; ++job) {
    wait_for(started_, job);
    if (quit_.load()) return;
    try {
      run_calls(*job_, comm_, mine_);
    } catch (...) {
      comm_error_ = std::current_exception();
    }
    set(finished_, job);
  }
}

void Lanes::run(const std::vector<Call>& mine, const std::vector<Call>& collectives) {
  if (collectives.empty()) return run_calls(mine, mine_, comm_);
  mine_.store(-1, std::memory_order_relaxed);
  comm_.store(-1, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  job_ = &collectives;
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  set(started_, started_.load() + 1);
  std::exception_ptr error;
  try {
    run_calls(mine, mine_, comm_);
  } catch (const std::exception& e) {
    error = std::current_exception();
    communicator_.abort(cat("rank ", communicator_.rank(), " stopped: ", e.what()));
  }
  wait_for(finished_, started_.load());
  if (!error) std::swap(error, comm_error_);
  comm_error_ = nullptr;
  if (error) std::rethrow_exception(error);
}

}  // namespace onnxddp

#include "executor/train/signals.h"

#include <csignal>

namespace onnxddp {
namespace {

volatile std::sig_atomic_t requested = 0;  // the greatest StopRequest so far
volatile std::sig_atomic_t final_second = 0;
constexpr int kCount = 4;
struct sigaction before[kCount];
constexpr int kSignals[kCount] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};

void note(int signal) {
  if (signal == SIGINT && requested == static_cast<int>(StopRequest::interrupt) && final_second != 0) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
    return;
  }
  const auto request = static_cast<int>(signal == SIGINT ? StopRequest::interrupt : StopRequest::stop);
  if (request > requested) requested = request;
}

}  // namespace

SignalWatch::SignalWatch(bool launched) {
  final_second = launched ? 0 : 1;
  struct sigaction action {};
  action.sa_handler = note;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (int i = 0; i < kCount; ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    const bool nohup = kSignals[i] == SIGHUP && before[i].sa_handler == SIG_IGN;
    if (!nohup) sigaction(kSignals[i], &action, nullptr);
  }
}

SignalWatch::~SignalWatch() {
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &before[i], nullptr);
}

StopRequest SignalWatch::request() { return static_cast<StopRequest>(static_cast<int>(requested)); }

}  // namespace onnxddp

// Requests to stop: SIGINT, SIGTERM, SIGUSR1 set a flag that the trainer looks at between steps.
#pragma once

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// none; save and exit 0 (SIGTERM, SIGUSR1); save and exit 130 (SIGINT).
enum class StopRequest : int { none = 0, stop = 1, interrupt = 2 };

/// While one lives, the signals ask instead of killing; the handlers before are put back afterwards. A second
/// SIGINT ends the process at once, unless a launcher decides about that (`launched`).
class SignalWatch {
 public:
  explicit SignalWatch(bool launched);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  static StopRequest request();
};

}  // namespace onnxddp

// Runs optimizer steps and evaluations of prepared programs in a session. It knows no gradient, collective or
// optimizer: those are nodes of the programs; it writes the few state scalars that they read.
#pragma once

#include <span>

#include "executor/train/prefetch.h"
#include "executor/train/setup.h"
#include "executor/train/signals.h"

namespace ONNXDDP_API onnxddp {

struct StepResult {
  double loss = 0;                       // mean over the step's global batch
  double grad_norm = 0;                  // before clipping
  StopRequest stop = StopRequest::none;  // what any rank asked for
};

class Stepper {
 public:
  /// Adds the programs to the session and sets the initial values. All must outlive the stepper.
  Stepper(const TrainSetup& setup, Session& session, Communicator& communicator);
  /// One optimizer step over this rank's micro-batches. `step` counts from 0. `ask`: this rank's request to
  /// stop.
  StepResult run(std::span<const Batch> micro_batches, std::int64_t step, double lr,
                 StopRequest ask = StopRequest::none);
  Session& session() { return session_; }

 private:
  double denominator(std::span<const Batch> micro_batches);
  void add_count_program();
  void set_random(std::int64_t step, std::int64_t micro);

  const TrainSetup& setup_;
  Session& session_;
  Communicator& communicator_;
  HostTensor hyper_, random_;
  std::size_t lr_column_ = 0, step_column_ = 0;
  bool has_random_ = false, has_stop_ = false, has_norm_ = false;
  std::vector<std::string> fetch_;
  double denominator_ = -1;
  std::vector<std::int64_t> sizes_;   // that denominator_ is for
  std::optional<StopRequest> asked_;  // what the state holds; a restored one may hold anything
};

/// Sums over all rows and ranks.
struct EvalResult {
  double loss = 0, accuracy = 0;
  bool has_accuracy = false;
  std::int64_t samples = 0;
};
/// Runs program "evaluate" over every row exactly once: ranks take consecutive shares; nothing is padded.
EvalResult evaluate(Session& session, Communicator& communicator, const BatchSource& data,
                    std::int64_t batch_size, const LossInfo& loss, const std::string& batch_symbol,
                    const DimBindings& dims);

/// Every state of the session from rank 0 to the others (`names`: only these).
void broadcast_states(Session& session, Communicator& communicator, const std::vector<std::string>& names);
/// Sets those values that the session's programs have.
void set_values(Session& session, const std::map<std::string, HostTensor>& values);

}  // namespace onnxddp

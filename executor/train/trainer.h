// The training loop. It contains no gradient, collective or optimizer code: all of that is nodes of the step
// program.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "executor/train/ranks.h"
#include "executor/train/setup.h"

namespace ONNXDDP_API onnxddp {

/// What the command line knows: texts that come from its option table, the terminal.
struct TrainContext {
  std::function<std::string(const Options&)> run_toml;  // every effective value
  std::function<std::string(const Options&)> semantic;  // those on which ranks must agree
  std::function<std::vector<std::string>()> changes;    // how the options differ from the resumed run's
  std::string version;
  bool no_color = false, dumb_terminal = false;  // NO_COLOR; TERM=dumb or CI
};

/// Trains and writes RUN_DIR. Returns the exit code (0, also after a stop by SIGTERM or SIGUSR1; 130 after
/// SIGINT); throws Error with exit code 4 when the loss is no number.
int train(TrainSetup& setup, RankGroup& ranks, const TrainContext& context);

/// Threads of this rank: --threads, or its share of the cores.
int thread_count(const Options& options, int ranks);

/// Throws the same Error on every rank unless graphs, options and data agree.
void check_ranks_agree(const TrainSetup& setup, Communicator& communicator, const std::string& semantic);

}  // namespace onnxddp

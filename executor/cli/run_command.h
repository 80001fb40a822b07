// What the commands that run something share: RUN operands, launching ranks, the program's own path.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "executor/cli/command_line.h"
#include "executor/train/ranks.h"

namespace onnxddp {

/// Who this process is, found once at the program's start.
struct Process {
  std::string program;           // path of this executable
  std::optional<RankInfo> rank;  // when it was started as a rank
};
Process& process();

/// A message for people, on stderr.
void say(const std::string& line);

/// The options over those of the RUN that the operand stands for, with the operand replaced by its model
/// file. `keys`: which of the run's options count; eval also takes the
/// data that the run evaluated on, else its training data.
Options resolve_run(const CommandLine& line, const std::vector<std::string>& keys);

/// With more than one rank asked for, and not a rank itself: becomes the launcher of ranks that get exactly
/// these options, and returns their exit code. Else runs `work` in this process.
int run_in_ranks(const CommandLine& line, const Options& options, const std::function<int(RankGroup&)>& work);

/// The options as flags, all of those of the command that are set.
std::vector<std::string> as_flags(const Options& options, unsigned command);

/// The whole report of an error on stderr, at most 6 lines, each of at most 400 characters. `rank`: to be
/// named, where no launcher of ours marks the lines; -1: none.
void print_error(const std::string& report, int rank);

}  // namespace onnxddp

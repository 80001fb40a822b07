// The launcher: spawns the ranks of this machine, prefixes their output, forwards signals, maps exit codes.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// Who this process is, from the launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and our
/// secret, passed through an inherited pipe or environment variable that children unset at once).
struct RankInfo {
  int rank = 0, world_size = 1, local_rank = 0, local_world_size = 1;
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;
  std::string secret;
};
/// Nothing when this process was not started as a rank. Throws usage Error "environment variable X expected, but not
/// set" for a partial set.
std::optional<RankInfo> rank_from_environment();

struct LaunchOptions {
  int nproc = 1;
  std::vector<std::string> command;        // argv of a rank (the program itself)
  std::string log_dir;                     // also write rank-R.out/.err there
  std::chrono::milliseconds grace{10'000}; // between SIGTERM and SIGKILL after a failure
};
/// Spawns, serves the store, waits. Children die with the launcher (parent-death signal plus a pipe). Output lines of
/// ranks other than 0 are prefixed "[rank 1] " and never interleave; rank 0 is passed through unchanged (a progress line works on a
/// terminal). First SIGINT/SIGTERM/SIGUSR1 is forwarded; the second SIGINT kills. When a rank fails the others are given
/// time to notice, then ended; an epilogue names the rank that failed first, its pid and exit code or signal name.
/// Returns the exit code for the program (3 when a rank was killed by a signal).
int launch(const LaunchOptions& options);

/// In a rank: arranges to die with the launcher. Call first thing in main.
void die_with_parent(const RankInfo& info);

}  // namespace onnxddp

// The launcher: spawns the ranks of this machine, prefixes their output, forwards signals, maps exit codes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/store.h"
#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// Who this process is, from the launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
/// MASTER_PORT, and our secret, passed through an inherited pipe or environment variable that children unset
/// at once).
struct RankInfo {
  int rank = 0, world_size = 1, local_rank = 0, local_world_size = 1;
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;
  std::string secret;  // of the store's login; empty under a foreign launcher
  int lifeline =
      -1;  // pipe that ends with our launcher, which also serves the store; -1 under a foreign launcher
};
/// Nothing when this process was not started as a rank. Throws usage Error "environment variable X expected,
/// but not set" for a partial set. Reads the secret from the launcher's pipe: call once.
std::optional<RankInfo> rank_from_environment();

/// A rank's place in its job.
struct Job {
  std::unique_ptr<StoreServer> server;  // in rank 0 under a foreign launcher; else empty
  std::unique_ptr<Store> store;
  std::string host;  // numeric address of this machine that the other ranks reach
};
/// Connects to the job's store, which rank 0 serves first where no launcher of ours does.
Job join_job(const RankInfo& info, std::chrono::milliseconds timeout);

struct LaunchOptions {
  int nproc = 1;
  std::vector<std::string> command;         // argv of a rank (the program itself)
  std::string log_dir;                      // also write rank-R.out/.err there
  std::chrono::milliseconds notice{5'000};  // after a failure, for the others to notice it by themselves
  std::chrono::milliseconds grace{10'000};  // then between SIGTERM and SIGKILL
};
/// Spawns, serves the store, waits. Call from the main thread (ranks die with the thread that spawns them).
/// Children die with the launcher (parent-death signal plus a pipe). Output lines of ranks other than 0 are
/// prefixed "[rank 1] " and never interleave; rank 0 is passed through unchanged (a progress line works on a
/// terminal). First SIGINT/SIGTERM/SIGUSR1 is forwarded; the second SIGINT kills. When a rank fails the
/// others are given time to notice, then ended; an epilogue names the rank that failed first, its pid and
/// exit code or signal name. Returns the exit code for the program: that of the rank that failed first and
/// not because of another (3 when it was killed by a signal), else 130 when a rank was interrupted, else 0.
int launch(const LaunchOptions& options);

/// In a rank: arranges to die with the launcher, if it is ours. Call first thing in main.
void die_with_parent(const RankInfo& info);

}  // namespace onnxddp

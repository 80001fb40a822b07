// How this process takes part in a run: alone, or as one of several ranks with a store and a communicator.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "distributed/communicator.h"
#include "distributed/launch.h"
#include "distributed/store.h"

namespace ONNXDDP_API onnxddp {

class RankGroup {
 public:
  /// Alone when `info` is absent; otherwise logs in to the launcher's store. `timeout`: of every collective.
  RankGroup(const std::optional<RankInfo>& info, std::chrono::milliseconds timeout);
  int rank() const { return info_.rank; }
  int size() const { return info_.world_size; }
  bool launched() const { return job_.store != nullptr; }
  /// Made at the first call, which all ranks must make.
  Communicator& communicator();

  /// Runs `work` on rank 0 only; every rank gets its result, or its Error with the same report and exit code.
  std::string on_rank_zero(const std::string& key, const std::function<std::string()>& work);
  /// Whether this rank should print the error: rank 0 always; another only if rank 0 does not report the same
  /// within a moment. Never throws.
  bool should_print(const std::string& report) noexcept;

 private:
  RankInfo info_;
  std::chrono::milliseconds timeout_;
  Job job_;
  std::unique_ptr<Communicator> communicator_;
};

/// `bytes` from rank 0 to all; the others' content and size are replaced.
void broadcast_bytes(Communicator& communicator, std::string& bytes);

}  // namespace onnxddp

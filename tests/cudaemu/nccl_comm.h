// Communicators between processes over one shared-memory segment each.
#pragma once
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/cudaemu/core.h"

namespace cudaemu {

inline constexpr int kMaxRanks = 16;
inline constexpr size_t kSlotBytes = size_t{1} << 20;

enum class Collective : int32_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter };
const char* name_of(Collective kind);
const char* name_of(ncclDataType_t type);

/// What all ranks must agree on, and where a rank issued it.
struct Descriptor {
  uint64_t number, count;
  Collective kind;
  int32_t type, op, root, captured, stream;
  double scalar;  ///< PreMulSum factor of this rank

  bool agrees(const Descriptor& other) const;
  std::string text() const;
};

/// A rank's part of the segment. Payload travels in chunks with one sequence of numbers; two chunks may be
/// under way.
struct RankState {
  std::atomic<int32_t> pid;   ///< 0: has not joined
  std::atomic<int32_t> left;  ///< 1: finalized or destroyed, 2: aborted
  std::atomic<uint64_t> heartbeat;
  std::atomic<uint64_t> posted, consumed;
  Descriptor descriptors[2];
  std::atomic<uint64_t> split_posted;
  int32_t split_color[2], split_key[2];
};

struct Segment {
  std::atomic<int32_t> joined, ranks, broken;
  RankState rank[kMaxRanks];
};

/// One rank's end of a communicator. Kept alive by queued operations.
class Comm {
 public:
  /// Joins the segment `name`; null with *result set if that is an error.
  static std::shared_ptr<Comm> join(const std::string& name, int rank, int size, bool blocking,
                                    ncclResult_t* result);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  RankState& state(int r) const { return segment_->rank[r]; }
  RankState& mine() const { return state(rank); }
  char* slot(int r, uint64_t sequence) const;
  bool complete() const { return segment_->joined.load() >= size; }
  bool broken() const { return segment_->broken.load() != 0; }
  void break_all() { segment_->broken.store(1); }
  /// Notices ranks that died or left; sets `error` once. At most every few milliseconds.
  void check_peers();
  /// Marks this rank as gone (1 left, 2 aborted).
  void leave(int how);
  void set_error(ncclResult_t result, const std::string& text);

  std::string name;
  int rank = 0, size = 1;
  bool blocking = true, aborted = false, finalizing = false;
  ncclResult_t error = ncclSuccess;
  std::string error_text;
  uint64_t issued = 0, finished = 0;  ///< collectives, in issue order
  uint64_t sequence = 1;              ///< of the next chunk
  bool chunk_posted = false;
  uint64_t splits = 0;
  int graphs = 0;           ///< executable graphs that hold collectives of this communicator
  int pretended_polls = 0;  ///< a non-blocking call that GetAsyncError still calls in progress
  struct Factor {
    bool alive;
    ncclDataType_t type;
    double value;
    const void* device;  ///< read when the collective runs, else null
  };
  std::vector<Factor> factors;  ///< of ncclRedOp_t ncclNumOps + i
  std::vector<std::pair<char*, size_t>> registered;

 private:
  Comm() = default;
  Segment* segment_ = nullptr;
  char* data_ = nullptr;
  int file_ = -1;
  double last_check_ = 0;
};

/// Name of a fresh segment.
std::string create_segment();

struct CollectiveCall {
  Collective kind;
  const void* in;
  void* out;
  size_t count;  ///< as in the NCCL call
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int root = 0;
};
size_t bytes_of(ncclDataType_t type);
/// Checks the call and queues it, at once or at the end of the group.
ncclResult_t issue(const std::shared_ptr<Comm>& comm, const CollectiveCall& call, cudaStream_t stream);

}  // namespace cudaemu

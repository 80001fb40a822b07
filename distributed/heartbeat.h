// Signs of life in the store, and from them: who is to blame when a collective fails. The socket that failed
// never tells: connections also break because an innocent rank has given up.
//   hb/R     "STEP COLLECTIVE INSIDE OP BEAT" of rank R, published by its side thread
//   deaths   counter of ranks that ended; dead/R = "ORDER HOW", published by the launcher of rank R
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "distributed/communicator.h"
#include "distributed/store.h"

namespace ONNXDDP_API onnxddp {

/// Where a rank is.
struct RankState {
  std::int64_t step = -1;       // -1: before the first
  std::int64_t collective = 0;  // how many it has begun
  bool inside = false;          // still in the last one
  std::string op = "start";     // the last one
  std::int64_t beat = 0;        // grows with every sign of life

  std::string str() const;
  static std::optional<RankState> parse(const std::string& text);
  /// "at step 118 in AllReduce (collective 7)"
  std::string describe() const;
  bool behind(const RankState& other) const;
};

struct HeartbeatOptions {
  int rank = 0, size = 1;
  std::chrono::milliseconds interval{500};
  std::chrono::milliseconds stale{
      15'000};  // a peer without a sign of life for so long is given up while we wait for it
};

/// One rank's signs of life. A side thread publishes them and watches the peers while this rank is in a
/// collective.
class Heartbeat {
 public:
  /// `give_up` is called by the side thread, at most once, when a peer is known to be gone.
  Heartbeat(Store& store, HeartbeatOptions options, std::function<void(const std::string& reason)> give_up);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  void note_step(std::int64_t step) { step_.store(step, std::memory_order_relaxed); }
  /// Around each collective; `op` is a literal.
  void begin(const char* op);
  void end() { inside_.store(false, std::memory_order_relaxed); }

  /// After a collective failed with `cause`: looks up the others and says who is to blame. Takes up to 2 s.
  std::string diagnose(const std::string& cause);

 private:
  struct Suspect {
    int rank;
    std::string text;
  };
  void run();
  void watch();
  RankState now() const;
  std::optional<RankState> read(int rank);
  std::optional<Suspect> find_dead(bool also_victims);
  std::optional<Suspect> wait_for_dead(std::chrono::steady_clock::time_point end);
  std::optional<Suspect> find_silent();
  std::optional<Suspect> find_late();

  Store& store_;
  const HeartbeatOptions options_;
  const std::function<void(const std::string&)> give_up_;
  std::atomic<std::int64_t> step_{-1}, collective_{0}, beat_{0};
  std::atomic<bool> inside_{false};
  std::atomic<const char*> op_{"start"};
  std::vector<std::pair<std::int64_t, std::chrono::steady_clock::time_point>>
      seen_;                   // last beat of each peer, and since when
  std::int64_t watched_ = -1;  // the collective that this rank was in at the last beat
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::thread thread_;
};

/// Publishes how a rank ended. `how`: "was killed by SIGKILL", "exited with code 1".
void publish_death(Store& store, int rank, const std::string& how);

/// Adds heartbeats to a communicator and, when a collective fails, the diagnosis to the message of its
/// PeerError.
std::unique_ptr<Communicator> with_heartbeat(std::unique_ptr<Communicator> inner, Store& store,
                                             HeartbeatOptions options);

}  // namespace onnxddp

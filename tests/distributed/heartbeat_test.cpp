#include "distributed/heartbeat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace onnxddp {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

HeartbeatOptions options(int rank, int size) {
  HeartbeatOptions o;
  o.rank = rank;
  o.size = size;
  o.interval = milliseconds(20);
  o.stale = milliseconds(300);
  return o;
}
void ignore(const std::string&) {}

// A rank in a collective: where its heartbeats say that it is.
struct FakeRank {
  FakeRank(Store& store, int rank, int size, std::int64_t step, int collectives)
      : heartbeat(store, options(rank, size), ignore) {
    heartbeat.note_step(step);
    for (int i = 0; i < collectives; ++i) {
      heartbeat.begin("AllReduce");
      if (i + 1 < collectives) heartbeat.end();
    }
  }
  Heartbeat heartbeat;
};

TEST(RankState, RoundTrips) {
  RankState p;
  p.step = 118;
  p.collective = 7;
  p.inside = true;
  p.op = "AllReduce";
  p.beat = 42;
  EXPECT_EQ(p.str(), "118 7 1 AllReduce 42");
  EXPECT_EQ(RankState::parse(p.str())->str(), p.str());
  EXPECT_EQ(p.describe(), "at step 118 in AllReduce (collective 7)");
  p.inside = false;
  EXPECT_EQ(p.describe(), "at step 118 after AllReduce (collective 7)");
  EXPECT_EQ(RankState().describe(), "before the first step");
  EXPECT_FALSE(RankState::parse("nonsense").has_value());
}

TEST(Heartbeat, NamesTheDeadRankThatWasFirst) {
  const auto store = make_memory_store();
  FakeRank own(*store, 0, 4, 118, 7), second(*store, 2, 4, 118, 6);
  publish_death(*store, 1, "exited with code 3");  // gave up because of rank 2
  publish_death(*store, 2, "was killed by SIGKILL");
  publish_death(*store, 3, "was killed by SIGTERM");
  std::this_thread::sleep_for(milliseconds(60));
  EXPECT_EQ(
      own.heartbeat.diagnose("reset"),
      "rank 2 was killed by SIGKILL; its last sign of life was at step 118 in AllReduce (collective 6); "
      "rank 0 waited at step 118 in AllReduce (collective 7)");
}

TEST(Heartbeat, NamesTheSilentRank) {
  const auto store = make_memory_store();
  FakeRank own(*store, 0, 3, 118, 7), alive(*store, 1, 3, 118, 7);
  RankState stopped;
  stopped.step = 118;
  stopped.collective = 6;
  stopped.op = "AllReduce";
  store->set("hb/2", stopped.str());
  EXPECT_THAT(
      own.heartbeat.diagnose("reset"),
      HasSubstr("rank 2 gives no sign of life; it stopped at step 118 after AllReduce (collective 6)"));
}

TEST(Heartbeat, NamesTheRankThatIsBehind) {
  const auto store = make_memory_store();
  FakeRank own(*store, 0, 3, 118, 7), other(*store, 1, 3, 118, 7), late(*store, 2, 3, 117, 5);
  EXPECT_THAT(
      own.heartbeat.diagnose("timeout"),
      HasSubstr("rank 2 is alive, but has not arrived; it stopped at step 117 in AllReduce (collective 5)"));
}

TEST(Heartbeat, KeepsTheCauseWhenNobodyIsBehind) {
  const auto store = make_memory_store();
  FakeRank own(*store, 0, 2, 118, 7), other(*store, 1, 2, 118, 7);
  EXPECT_EQ(
      own.heartbeat.diagnose("AllReduce failed: reset"),
      "AllReduce failed: reset; no rank is behind; rank 0 waited at step 118 in AllReduce (collective 7)");
}

// Waits for a reason to give up, up to 10 s.
struct GivenUp {
  std::atomic<bool> done{false};
  std::string reason;
  std::function<void(const std::string&)> callback() {
    return [this](const std::string& text) {
      if (done) return;
      reason = text;
      done = true;
    };
  }
  bool wait() const {
    for (int i = 0; i < 2000 && !done; ++i) std::this_thread::sleep_for(milliseconds(5));
    return done;
  }
};

TEST(Heartbeat, GivesUpADeadPeerOnlyWhileWaiting) {
  const auto store = make_memory_store();
  GivenUp given_up;
  Heartbeat own(*store, options(0, 2), given_up.callback());
  publish_death(*store, 1, "exited with code 0");
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_FALSE(given_up.done);
  own.begin("Barrier");
  ASSERT_TRUE(given_up.wait());
  EXPECT_THAT(given_up.reason, HasSubstr("rank 1 exited with code 0"));
}

TEST(Heartbeat, GivesUpAPeerWithoutSignOfLife) {
  const auto store = make_memory_store();
  GivenUp given_up;
  Heartbeat own(*store, options(0, 3), given_up.callback());
  FakeRank alive(*store, 1, 3, 1, 1);
  own.begin("Barrier");
  ASSERT_TRUE(given_up.wait());
  EXPECT_EQ(given_up.reason, "rank 2 gives no sign of life");
}

TEST(Heartbeat, GivesUpWithoutAStore) {
  auto server = std::make_unique<StoreServer>("127.0.0.1", 0, "s");
  const auto client = connect_store("127.0.0.1", server->port(), "s", milliseconds(5'000));
  GivenUp given_up;
  Heartbeat own(*client, options(0, 2), given_up.callback());
  server.reset();
  ASSERT_TRUE(given_up.wait());
  EXPECT_THAT(given_up.reason, HasSubstr("the store at 127.0.0.1"));
}

}  // namespace
}  // namespace onnxddp

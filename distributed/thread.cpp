// Ranks that are threads of one process.
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "distributed/communicator.h"
#include "distributed/reduce.h"

namespace onnxddp {
namespace {

// What a rank brings to a collective. All ranks must bring the same but for the pointers.
struct Call {
  const char* op = "";
  std::size_t bytes = 0;
  int detail = 0;  // dtype or root
  const void* in = nullptr;
  void* out = nullptr;

  bool matches(const Call& other) const {
    return std::strcmp(op, other.op) == 0 && bytes == other.bytes && detail == other.detail;
  }
  std::string str() const { return cat(op, "(", bytes, " bytes)"); }
};

// The meeting point of the ranks.
class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds timeout)
      : calls_(static_cast<std::size_t>(size)), arrived_(calls_.size(), false), timeout_(timeout) {}

  int size() const { return static_cast<int>(calls_.size()); }
  const Call& call(int rank) const { return calls_[static_cast<std::size_t>(rank)]; }

  // Brings a call and waits for everybody's; checks that they match.
  void begin(int rank, const Call& call) {
    calls_[static_cast<std::size_t>(rank)] = call;
    wait_for_all(rank, call.op);
    for (int r = 1; r < size(); ++r) {
      CHECK(this->call(r).matches(this->call(0)), "rank ", r, " called ", this->call(r).str(),
            " where rank 0 called ", this->call(0).str());
    }
  }

  void wait_for_all(int rank, const char* op) {
    std::unique_lock lock(mutex_);
    check_failure();
    const auto round = round_;
    arrived_[static_cast<std::size_t>(rank)] = true;
    if (++count_ == size()) {
      arrived_.assign(arrived_.size(), false);
      count_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    const bool in_time = changed_.wait_for(lock, timeout_, [&] { return round_ != round || failure_; });
    if (round_ != round) return;
    if (!in_time)
      failure_ =
          cat("rank ", missing(), " did not arrive at ", op, " within ", timeout_.count() / 1000.0, " s");
    changed_.notify_all();
    check_failure();
  }

  // Wakes everybody with PeerError(reason); the first reason stays.
  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = reason;
    changed_.notify_all();
  }

 private:
  void check_failure() const {
    if (failure_) throw PeerError(*failure_);
  }
  std::size_t missing() const {
    std::size_t r = 0;
    while (r + 1 < arrived_.size() && arrived_[r]) ++r;
    return r;
  }

  std::vector<Call> calls_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> arrived_;
  int count_ = 0;
  std::uint64_t round_ = 0;
  std::optional<std::string> failure_;
  std::chrono::milliseconds timeout_;
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return meeting_.size(); }

  // Each rank sums its share in its own buffer, then all copy the others' shares.
  void all_reduce(void* data, std::size_t count, DType dtype) override {
    const std::size_t width = reducible_size(dtype);
    meeting_.begin(rank_, {"AllReduce", count * width, static_cast<int>(dtype), data, data});
    const Span own = share_of(count, rank_, size());
    ordered_sum(parts(own.begin * width), own.count(), dtype, static_cast<char*>(data) + own.begin * width);
    meeting_.wait_for_all(rank_, "AllReduce");
    for (int r = 0; r < size(); ++r) {
      const Span part = share_of(count, r, size());
      if (r == rank_ || part.count() == 0) continue;
      std::memcpy(static_cast<char*>(data) + part.begin * width,
                  static_cast<const char*>(meeting_.call(r).in) + part.begin * width, part.count() * width);
    }
    meeting_.wait_for_all(rank_, "AllReduce");
  }

  void all_gather(const void* data, std::size_t bytes, void* out) override {
    meeting_.begin(rank_, {"AllGather", bytes, 0, data, out});
    for (int r = 0; bytes > 0 && r < size(); ++r) {
      char* to = static_cast<char*>(out) + static_cast<std::size_t>(r) * bytes;
      if (to != meeting_.call(r).in)
        std::memcpy(to, meeting_.call(r).in, bytes);  // in place: others read it now
    }
    meeting_.wait_for_all(rank_, "AllGather");
  }

  void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) override {
    const std::size_t bytes = count * reducible_size(dtype);
    meeting_.begin(rank_, {"ReduceScatter", bytes, static_cast<int>(dtype), in, out});
    ordered_sum(parts(static_cast<std::size_t>(rank_) * bytes), count, dtype, out);
    meeting_.wait_for_all(rank_, "ReduceScatter");
  }

  void broadcast(void* data, std::size_t bytes, int root) override {
    CHECK(root >= 0 && root < size(), root);
    meeting_.begin(rank_, {"Broadcast", bytes, root, data, data});
    if (rank_ != root && bytes > 0) std::memcpy(data, meeting_.call(root).in, bytes);
    meeting_.wait_for_all(rank_, "Broadcast");
  }

  void barrier() override {
    meeting_.begin(rank_, {"Barrier"});
    meeting_.wait_for_all(rank_,
                          "Barrier");  // nobody brings the next call while others still compare this one
  }

  void abort(const std::string& reason) override { meeting_.fail(reason); }

 private:
  std::vector<const void*> parts(std::size_t offset) const {
    std::vector<const void*> all;
    for (int r = 0; r < size(); ++r) all.push_back(static_cast<const char*>(meeting_.call(r).in) + offset);
    return all;
  }

  Meeting& meeting_;
  const int rank_;
};

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown exception";
  }
}

}  // namespace

void run_ranks(int size, const std::function<void(Communicator&)>& body, std::chrono::milliseconds timeout) {
  CHECK(size >= 1, size);
  Meeting meeting(size, timeout);
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    ThreadCommunicator communicator(meeting, rank);
    std::exception_ptr error;
    try {
      body(communicator);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      const std::lock_guard lock(mutex);
      if (!first) first = error;
    }
    // Also a rank that ended well wakes those that still wait for it.
    meeting.fail(error ? cat("rank ", rank, " failed: ", message_of(error))
                       : cat("rank ", rank, " has ended"));
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size; ++rank) threads.emplace_back(run, rank);
  run(0);
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace onnxddp

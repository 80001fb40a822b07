#include "distributed/heartbeat.h"

#include <algorithm>
#include <csignal>
#include <sstream>
#include <tuple>

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kReapTime{400};    // within it a launcher has mostly published the death of a rank
constexpr milliseconds kPatience{1'600};  // for the death of a rank that has fallen silent

std::string heartbeat_key(int rank) { return cat("hb/", rank); }
std::string death_key(int rank) { return cat("dead/", rank); }

// A rank that ended because of another one.
bool is_victim(const std::string& how) {
  return how == cat("exited with code ", static_cast<int>(kExitPeer));
}

}  // namespace

std::string RankState::str() const {
  return cat(step, ' ', collective, ' ', inside ? 1 : 0, ' ', op, ' ', beat);
}

std::optional<RankState> RankState::parse(const std::string& text) {
  RankState p;
  std::istringstream in(text);
  if (in >> p.step >> p.collective >> p.inside >> p.op >> p.beat) return p;
  return std::nullopt;
}

std::string RankState::describe() const {
  const std::string place = step < 0 ? "before the first step" : cat("at step ", step);
  if (collective == 0) return place;
  return cat(place, inside ? " in " : " after ", op, " (collective ", collective, ")");
}

bool RankState::behind(const RankState& other) const {
  return std::tuple(step, collective) < std::tuple(other.step, other.collective);
}

void publish_death(Store& store, int rank, const std::string& how) {
  store.set(death_key(rank), cat(store.add("deaths", 1), ' ', how));
}

Heartbeat::Heartbeat(Store& store, HeartbeatOptions options, std::function<void(const std::string&)> give_up)
    : store_(store),
      options_(options),
      give_up_(std::move(give_up)),
      seen_(static_cast<std::size_t>(options.size), {-1, Clock::now()}) {
  store_.set(heartbeat_key(options_.rank), now().str());
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the side thread takes no signals
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
  try {
    store_.set(heartbeat_key(options_.rank), now().str());  // where this rank has stopped
  } catch (const std::exception&) {
    // Without a store nobody asks.
  }
}

void Heartbeat::begin(const char* op) {
  op_.store(op, std::memory_order_relaxed);
  collective_.store(collective_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  inside_.store(true, std::memory_order_relaxed);
}

RankState Heartbeat::now() const {
  return {step_.load(std::memory_order_relaxed), collective_.load(std::memory_order_relaxed),
          inside_.load(std::memory_order_relaxed), op_.load(std::memory_order_relaxed),
          beat_.load(std::memory_order_relaxed)};
}

void Heartbeat::run() {
  try {
    std::unique_lock lock(mutex_);
    while (!stop_.wait_for(lock, options_.interval, [&] { return stopping_; })) {
      lock.unlock();
      beat_.fetch_add(1, std::memory_order_relaxed);
      store_.set(heartbeat_key(options_.rank), now().str());
      watch();
      lock.lock();
    }
  } catch (const std::exception& error) {
    give_up_(error.what());  // no store, no job
  }
}

// While this rank waits in one collective for more than an interval: is everybody there still alive?
void Heartbeat::watch() {
  const RankState own = now();
  const bool waiting = own.inside && own.collective == watched_;
  watched_ = own.inside ? own.collective : -1;
  if (!waiting) return;
  if (const auto dead = find_dead(true)) return give_up_(dead->text);
  for (int rank = 0; rank < options_.size; ++rank) {
    const auto progress = read(rank);
    auto& [beat, since] = seen_[static_cast<std::size_t>(rank)];
    const std::int64_t current = progress ? progress->beat : -1;
    if (current != beat) {
      beat = current;
      since = Clock::now();
    } else if (rank != options_.rank && Clock::now() - since > options_.stale) {
      return give_up_(cat("rank ", rank, " gives no sign of life"));
    }
  }
}

std::optional<RankState> Heartbeat::read(int rank) {
  const auto text = store_.try_get(heartbeat_key(rank));
  return text ? RankState::parse(*text) : std::nullopt;
}

// The rank that ended first; one that ended because of another only if `also_victims`.
std::optional<Heartbeat::Suspect> Heartbeat::find_dead(bool also_victims) {
  if (!store_.try_get("deaths")) return std::nullopt;
  std::optional<std::tuple<bool, std::int64_t, int, std::string>> first;
  for (int rank = 0; rank < options_.size; ++rank) {
    const auto text = store_.try_get(death_key(rank));
    if (!text || rank == options_.rank) continue;
    std::istringstream in(*text);
    std::int64_t order = 0;
    std::string how;
    in >> order >> std::ws;
    std::getline(in, how);
    const std::tuple candidate(is_victim(how), order, rank, how);
    if (!first || candidate < *first) first = candidate;
  }
  if (!first || (std::get<0>(*first) && !also_victims)) return std::nullopt;
  const int rank = std::get<2>(*first);
  const RankState last = read(rank).value_or(RankState{});
  return Suspect{
      rank, cat("rank ", rank, " ", std::get<3>(*first), "; its last sign of life was ", last.describe())};
}

// A rank whose side thread has stopped: a stopped process, a dead machine, a cut network.
std::optional<Heartbeat::Suspect> Heartbeat::find_silent() {
  std::vector<std::optional<RankState>> before;
  for (int rank = 0; rank < options_.size; ++rank) before.push_back(read(rank));
  std::this_thread::sleep_for(options_.interval * 9 / 4);
  std::optional<Suspect> silent;
  RankState lowest;
  for (int rank = 0; rank < options_.size; ++rank) {
    const auto& old = before[static_cast<std::size_t>(rank)];
    const auto current = read(rank);
    if (rank == options_.rank || (current && (!old || current->beat != old->beat))) continue;
    const RankState last = current.value_or(RankState{});
    if (silent && !last.behind(lowest)) continue;
    lowest = last;
    silent = Suspect{rank, cat("rank ", rank, " gives no sign of life; it stopped ", last.describe())};
  }
  return silent;
}

std::optional<Heartbeat::Suspect> Heartbeat::find_late() {
  std::optional<Suspect> late;
  RankState lowest = now();
  for (int rank = 0; rank < options_.size; ++rank) {
    const auto progress = read(rank);
    if (rank == options_.rank || !progress || !progress->behind(lowest)) continue;
    lowest = *progress;
    late =
        Suspect{rank, cat("rank ", rank, " is alive, but has not arrived; it stopped ", lowest.describe())};
  }
  return late;
}

std::optional<Heartbeat::Suspect> Heartbeat::wait_for_dead(Clock::time_point end) {
  std::optional<Suspect> dead;
  while (!(dead = find_dead(false)) && Clock::now() < end) std::this_thread::sleep_for(milliseconds(20));
  return dead;
}

std::string Heartbeat::diagnose(const std::string& cause) {
  const std::string own = cat("rank ", options_.rank, " waited ", now().describe());
  const auto start = Clock::now();
  try {
    std::optional<Suspect> suspect = wait_for_dead(start + kReapTime);
    if (!suspect) {
      const auto silent = find_silent();
      if (silent) suspect = wait_for_dead(start + kPatience);
      if (!suspect) suspect = silent;
    }
    if (!suspect) suspect = find_dead(true);
    if (!suspect) suspect = find_late();
    if (suspect) return cat(suspect->text, "; ", own);
  } catch (const Error& error) {
    return cat(cause, "; ", error.what(), "; ", own);
  }
  return cat(cause, "; no rank is behind; ", own);
}

namespace {

class GuardedCommunicator : public Communicator {
 public:
  GuardedCommunicator(std::unique_ptr<Communicator> inner, Store& store, HeartbeatOptions options)
      : inner_(std::move(inner)),
        heartbeat_(store, options, [this](const std::string& reason) { inner_->abort(reason); }) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void all_reduce(void* data, std::size_t count, DType dtype) override {
    guard("AllReduce", [&] { inner_->all_reduce(data, count, dtype); });
  }
  void all_gather(const void* data, std::size_t bytes, void* out) override {
    guard("AllGather", [&] { inner_->all_gather(data, bytes, out); });
  }
  void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) override {
    guard("ReduceScatter", [&] { inner_->reduce_scatter(in, count, dtype, out); });
  }
  void broadcast(void* data, std::size_t bytes, int root) override {
    guard("Broadcast", [&] { inner_->broadcast(data, bytes, root); });
  }
  void barrier() override {
    guard("Barrier", [&] { inner_->barrier(); });
  }
  void note_step(std::int64_t step) override { heartbeat_.note_step(step); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  template <class Body>
  void guard(const char* op, const Body& body) {
    if (!failure_.empty()) throw PeerError(failure_);
    heartbeat_.begin(op);
    try {
      body();
    } catch (const PeerError& error) {
      failure_ = heartbeat_.diagnose(error.what());
      throw PeerError(failure_);
    }
    heartbeat_.end();
  }

  std::unique_ptr<Communicator> inner_;
  Heartbeat heartbeat_;
  std::string failure_;
};

}  // namespace

std::unique_ptr<Communicator> with_heartbeat(std::unique_ptr<Communicator> inner, Store& store,
                                             HeartbeatOptions options) {
  return std::make_unique<GuardedCommunicator>(std::move(inner), store, options);
}

}  // namespace onnxddp

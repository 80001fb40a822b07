// Order and waits: which step knows which others to be finished, and which updates may happen in place.
#include <algorithm>

#include "executor/plan/draft.h"
#include "graph/op.h"

namespace onnxddp {
namespace {

constexpr Clock kNever = {-1, -1, -1};

class Order {
 public:
  explicit Order(Draft& draft) : d_(draft) {}

  void run() {
    last_write_.assign(d_.plan.slots.size(), -1);
    last_use_.assign(d_.plan.slots.size(), kNever);
    last_on_lane_ = kNever;
    for (std::size_t s = 0; s < d_.plan.steps.size(); ++s) enter(static_cast<int>(s));
    for (SlotUpdate& update : d_.updates) update.aliased = try_in_place(update);
    for (const SlotUpdate& update : d_.updates)
      if (!update.aliased) enter(d_.add_move("Copy", update.source, update.param));
  }

 private:
  Step& step(int s) { return d_.plan.steps[static_cast<std::size_t>(s)]; }
  Clock& before(int s) { return d_.before[static_cast<std::size_t>(s)]; }
  int& last_write(int home) { return last_write_[static_cast<std::size_t>(home)]; }
  Clock& last_use(int home) { return last_use_[static_cast<std::size_t>(home)]; }

  /// Sets the step's clock and waits: after the writers of what it reads, after all users of what it
  /// overwrites.
  void enter(int s) {
    const int lane = lane_index(step(s).lane);
    Clock needs = kNever;
    for (const int r : step(s).reads)
      if (r >= 0) need(needs, last_write(d_.home(r)));
    for (const int w : step(s).writes)
      if (w >= 0)
        for (const int use : last_use(d_.home(w))) need(needs, use);
    Clock known = kNever;
    if (const int previous = last_on_lane_[static_cast<std::size_t>(lane)]; previous >= 0)
      learn(known, previous);
    std::sort(needs.begin(), needs.end(), std::greater<>());  // the latest first: it may cover the others
    for (const int t : needs) {
      if (t < 0 || known[static_cast<std::size_t>(lane_index(step(t).lane))] >= t) continue;
      step(s).waits.push_back(t);
      learn(known, t);
    }
    std::sort(step(s).waits.begin(), step(s).waits.end());
    d_.before.push_back(known);
    last_on_lane_[static_cast<std::size_t>(lane)] = s;
    use(s, lane);
  }

  void use(int s, int lane) {
    for (const auto* slots : {&step(s).reads, &step(s).writes})
      for (const int i : *slots)
        if (i >= 0) last_use(d_.home(i))[static_cast<std::size_t>(lane)] = s;
    for (const int w : step(s).writes)
      if (w >= 0) last_write(d_.home(w)) = s;
  }

  void need(Clock& needs, int s) {
    if (s < 0) return;
    int& latest = needs[static_cast<std::size_t>(lane_index(step(s).lane))];
    latest = std::max(latest, s);
  }

  /// After step s is finished, so is everything that it knew to be.
  void learn(Clock& known, int s) {
    for (std::size_t l = 0; l < kLanes; ++l) known[l] = std::max(known[l], before(s)[l]);
    int& own = known[static_cast<std::size_t>(lane_index(step(s).lane))];
    own = std::max(own, s);
  }

  /// Whether step s may read the param's memory and overwrite it with its output `source`.
  bool pairs_up(int s, int param, int source) {
    if (!step(s).node) return false;
    const Traits& traits = d_.graph.node(step(s).node).op->traits;
    int operands = 0;
    bool paired = false;
    for (std::size_t i = 0; i < step(s).reads.size(); ++i) {
      if (step(s).reads[i] < 0 || d_.home(step(s).reads[i]) != param) continue;
      ++operands;
      for (const auto& [in, out] : traits.in_place)
        paired |= in == static_cast<int>(i) && step(s).writes[static_cast<std::size_t>(out)] == source;
    }
    return operands == 1 && paired;
  }

  /// The source moves into the param's memory if nobody needs the old contents once it is written.
  bool try_in_place(SlotUpdate& update) {
    SlotNotes& source = d_.note(update.source);
    const int s = source.writer;
    if (source.home != update.source || source.bucket >= 0 || s < 0 || step(s).lane != Lane::compute)
      return false;
    const Clock& readers = last_use(update.param);
    for (std::size_t l = 0; l < kLanes; ++l) {
      if (readers[l] <= before(s)[l]) continue;
      if (readers[l] != s || !pairs_up(s, update.param, update.source)) return false;
    }
    source.home = update.param;
    for (std::size_t l = 0; l < kLanes; ++l)
      last_use(update.param)[l] = std::max(last_use(update.param)[l], last_use(update.source)[l]);
    last_write(update.param) = last_write(update.source);
    return true;
  }

  Draft& d_;
  Clock last_on_lane_ = kNever;
  std::vector<int> last_write_;  // by home slot
  std::vector<Clock> last_use_;  // by home slot: reads and writes
};

}  // namespace

void put_in_order(Draft& draft) { Order(draft).run(); }

}  // namespace onnxddp

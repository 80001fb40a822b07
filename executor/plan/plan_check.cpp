// Proves from the finished plan alone that memory and order are right. It shares no code with the planner.
#include <array>
#include <map>

#include "executor/plan/plan.h"

namespace onnxddp {
namespace {

constexpr std::size_t kLaneCount = 3;
using Known = std::array<int, kLaneCount>;  // by lane: the last step that is finished

// Owners that are no slots.
constexpr int kNobody = -1;   // never written
constexpr int kScratch = -2;  // a kernel's temporary bytes
constexpr int kNext = -3;     // a param's value for the next step

/// What is known of a range of bytes.
struct Bytes {
  std::size_t end = 0;
  int owner = kNobody;
  int writer = -1;               // step; -1: before the first
  Known readers = {-1, -1, -1};  // last by lane
};

class Check {
 public:
  explicit Check(const Plan& plan) : plan_(plan) {}

  void run() {
    check_slots();
    fill_regions();
    int collectives = 0;
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      const Step& step = plan_.steps[s];
      at_ = static_cast<int>(s);
      collectives += step.lane == Lane::comm;
      check_waits(step);
      for (const int r : step.reads)
        if (r >= 0) read(r);
      if (step.scratch_bytes > 0)
        write({Region::arena, step.scratch_offset, step.scratch_bytes}, kScratch, "scratch");
      for (const int w : step.writes)
        if (w >= 0) write(w);
    }
    at_ = static_cast<int>(plan_.steps.size());
    if (collectives != plan_.collectives)
      fail("there are ", collectives, " collectives, the plan says ", plan_.collectives);
    known_.push_back({at_, at_, at_});  // all lanes are joined before outputs are fetched
    for (const auto& [name, slot] : plan_.outputs) read(slot);
  }

 private:
  struct Range {
    Region region;
    std::size_t offset, bytes;
  };
  using Map = std::map<std::size_t, Bytes>;

  template <class... Ts>
  [[noreturn]] void fail(const Ts&... parts) const {
    std::string where = plan_.name;
    const std::size_t s = static_cast<std::size_t>(at_);
    if (at_ >= 0 && s < plan_.steps.size()) where += cat(", step ", at_, " ", plan_.steps[s].op);
    if (at_ >= 0 && s == plan_.steps.size()) where += ", end";
    throw InternalError(cat("plan ", where, ": ", parts...));
  }

  const Slot& slot(int i) const { return plan_.slots[static_cast<std::size_t>(i)]; }
  int root(int i) const { return slot(i).view_of < 0 ? i : slot(i).view_of; }
  std::string owner_name(int owner) const {
    if (owner >= 0) return cat("'", slot(owner).name, "'");
    return owner == kScratch ? "scratch" : owner == kNext ? "the next step's value" : "nothing";
  }

  std::size_t region_bytes(Region region) const {
    switch (region) {
      case Region::feeds: return plan_.feeds_bytes;
      case Region::state: return plan_.state_bytes;
      case Region::grads: return plan_.grads_bytes;
      case Region::arena: return plan_.arena_bytes;
      case Region::constants: return plan_.constants_bytes;
      case Region::none: break;
    }
    return 0;
  }

  void check_slots() const {
    for (const Slot& s : plan_.slots) {
      if (s.bytes != s.type.bytes())
        fail("'", s.name, "' has ", s.bytes, " bytes, its type ", s.type.bytes());
      if (s.region == Region::none) fail("'", s.name, "' is nowhere");
      if (s.offset % 64 != 0) fail("'", s.name, "' is not aligned");
      if (s.offset + s.bytes > region_bytes(s.region)) fail("'", s.name, "' leaves ", region_name(s.region));
      if (s.view_of < 0) continue;
      const Slot& of = slot(s.view_of);
      if (of.view_of >= 0 || of.region != s.region || of.offset != s.offset || of.bytes != s.bytes)
        fail("'", s.name, "' is no view of '", of.name, "'");
    }
  }

  /// Who owns which bytes before the first step. The first slot at a place of the state is the param itself:
  /// values that move in come later in the plan.
  void fill_regions() {
    for (int i = 0; i < 6; ++i)
      maps_[static_cast<std::size_t>(i)][0] = {region_bytes(static_cast<Region>(i))};
    for (std::size_t i = 0; i < plan_.slots.size(); ++i) {
      const Slot& s = plan_.slots[i];
      if (s.bytes == 0 || s.view_of >= 0) continue;
      if (s.region != Region::feeds && s.region != Region::state && s.region != Region::constants) continue;
      const Range range{s.region, s.offset, s.bytes};
      for (auto it = cut(range); it != map(s.region).end() && it->first < s.offset + s.bytes; ++it) {
        if (it->second.owner != kNobody) continue;
        it->second.owner = static_cast<int>(i);
        param_[i] = true;
      }
    }
  }

  void check_waits(const Step& step) {
    const std::size_t lane = static_cast<std::size_t>(step.lane);
    Known known = {-1, -1, -1};
    if (previous_[lane] >= 0) learn(known, previous_[lane]);
    for (const int w : step.waits) {
      if (w < 0 || w >= at_) fail("waits for step ", w, ", which is not before it");
      learn(known, w);
    }
    known_.push_back(known);
    previous_[lane] = at_;
  }

  void learn(Known& known, int step) const {
    const std::size_t s = static_cast<std::size_t>(step);
    for (std::size_t l = 0; l < kLaneCount; ++l) known[l] = std::max(known[l], known_[s][l]);
    int& own = known[static_cast<std::size_t>(plan_.steps[s].lane)];
    own = std::max(own, step);
  }

  bool finished(int step) const {
    if (step < 0) return true;
    return known_.back()[static_cast<std::size_t>(plan_.steps[static_cast<std::size_t>(step)].lane)] >= step;
  }

  Map& map(Region region) { return maps_[static_cast<std::size_t>(region)]; }

  /// Splits the region's ranges at both ends of `range`; returns the first within.
  Map::iterator cut(const Range& range) {
    Map& all = map(range.region);
    if (range.offset + range.bytes > region_bytes(range.region))
      fail("touches bytes outside of ", region_name(range.region));
    for (const std::size_t at : {range.offset, range.offset + range.bytes}) {
      auto it = std::prev(all.upper_bound(at));
      if (it->first == at || at >= it->second.end) continue;
      Bytes tail = it->second;
      it->second.end = at;
      all.emplace(at, tail);
    }
    return all.find(range.offset);
  }

  void read(int i) {
    const Slot& s = slot(i);
    if (s.bytes == 0) return;
    const Range range{s.region, s.offset, s.bytes};
    for (auto it = cut(range); it != map(s.region).end() && it->first < s.offset + s.bytes; ++it) {
      Bytes& b = it->second;
      if (b.owner == kNobody) fail("reads '", s.name, "' before it is written");
      if (s.region != Region::constants && b.owner != root(i))
        fail("reads '", s.name, "' where ", owner_name(b.owner), " is");
      if (!finished(b.writer)) fail("reads '", s.name, "' without waiting for step ", b.writer);
      if (static_cast<std::size_t>(at_) < plan_.steps.size())
        b.readers[static_cast<std::size_t>(plan_.steps[static_cast<std::size_t>(at_)].lane)] = at_;
    }
  }

  void write(int i) {
    const Slot& s = slot(i);
    if (s.view_of >= 0) fail("writes the view '", s.name, "'");
    if (s.region == Region::feeds || s.region == Region::constants)
      fail("writes '", s.name, "' in ", region_name(s.region));
    if (s.bytes == 0) return;
    check_in_place(s);
    write({s.region, s.offset, s.bytes}, param_.count(static_cast<std::size_t>(i)) ? kNext : i, s.name);
  }

  void write(const Range& range, int owner, const std::string& name) {
    auto it = cut(range);
    for (auto each = it; each != map(range.region).end() && each->first < range.offset + range.bytes;
         ++each) {
      const Bytes& b = each->second;
      if (b.writer == at_ || !finished(b.writer))
        fail("writes '", name, "' without waiting for step ", b.writer);
      for (const int reader : b.readers) {
        if (reader == at_ ? owner == kScratch : !finished(reader))
          fail("writes '", name, "' over ", owner_name(b.owner), ", which step ", reader, " reads");
      }
    }
    it->second = {range.offset + range.bytes, owner, at_};
    Map& all = map(range.region);
    for (++it; it != all.end() && it->first < range.offset + range.bytes;) it = all.erase(it);
  }

  /// A result may share an operand's bytes only as a whole.
  void check_in_place(const Slot& y) const {
    for (const int r : plan_.steps[static_cast<std::size_t>(at_)].reads) {
      if (r < 0) continue;
      const Slot& x = slot(r);
      if (x.region != y.region || x.offset + x.bytes <= y.offset || y.offset + y.bytes <= x.offset) continue;
      if (x.offset != y.offset || x.bytes != y.bytes)
        fail("writes '", y.name, "' over a part of its operand '", x.name, "'");
    }
  }

  const Plan& plan_;
  std::array<Map, 6> maps_;            // by region: where each range begins
  std::map<std::size_t, bool> param_;  // slots that hold their value when the step begins
  std::vector<Known> known_;           // by step
  Known previous_ = {-1, -1, -1};      // by lane
  int at_ = -1;
};

/// A collective as all ranks must see it.
std::string call_str(const Plan& plan, const Step& step) {
  std::string out = step.op;
  for (const int r : step.reads)
    if (r >= 0) {
      const Slot& slot = plan.slots[static_cast<std::size_t>(r)];
      out += cat(" ", slot.name, ":", dtype_name(slot.type.dtype), "x", slot.type.numel());
    }
  return out;
}

}  // namespace

void plan_check(const Plan& plan) { Check(plan).run(); }

void plan_check_ranks(const std::vector<const Plan*>& ranks) {
  std::vector<std::vector<std::string>> calls(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r)
    for (const Step& step : ranks[r]->steps)
      if (step.lane == Lane::comm) calls[r].push_back(call_str(*ranks[r], step));
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    for (std::size_t i = 0; i < std::max(calls[0].size(), calls[r].size()); ++i) {
      const std::string mine = i < calls[r].size() ? calls[r][i] : "nothing";
      const std::string first = i < calls[0].size() ? calls[0][i] : "nothing";
      if (mine != first)
        throw InternalError(cat("collective ", i, ": rank 0 issues ", first, ", rank ", r, " ", mine));
    }
  }
}

}  // namespace onnxddp

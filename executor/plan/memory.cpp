// Memory: aliases of dying operands, regions, and the arena.
#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "executor/plan/draft.h"
#include "graph/op.h"

namespace onnxddp {
namespace {

constexpr std::size_t kManyBlocks = 3000;

/// Biggest first, each into the smallest gap between those that live at the same time.
std::pair<std::vector<std::size_t>, std::size_t> pack_by_size(const std::vector<Block>& blocks) {
  std::vector<std::size_t> order(blocks.size()), offsets(blocks.size(), 0), placed;
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return blocks[a].bytes > blocks[b].bytes; });
  std::size_t total = 0;
  for (const std::size_t i : order) {
    const std::size_t size = padded(blocks[i].bytes);
    std::size_t best = 0, best_gap = std::numeric_limits<std::size_t>::max(), top = 0;
    for (const std::size_t j : placed) {  // by offset
      if (blocks[j].end < blocks[i].begin || blocks[i].end < blocks[j].begin) continue;
      if (offsets[j] >= top + size && offsets[j] - top < best_gap) best = top, best_gap = offsets[j] - top;
      top = std::max(top, offsets[j] + padded(blocks[j].bytes));
    }
    offsets[i] = best_gap == std::numeric_limits<std::size_t>::max() ? top : best;
    total = std::max(total, offsets[i] + size);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), i,
                                   [&](std::size_t a, std::size_t b) { return offsets[a] < offsets[b]; }),
                  i);
  }
  return {std::move(offsets), total};
}

/// Free ranges below the top of the arena.
class FreeList {
 public:
  /// The tightest free range, else the end of the arena.
  std::size_t take(std::size_t size) {
    auto fit = by_size_.lower_bound({size, 0});
    if (fit == by_size_.end()) {
      std::size_t offset = top_;
      if (!by_offset_.empty() && by_offset_.rbegin()->first + by_offset_.rbegin()->second == top_) {
        offset = by_offset_.rbegin()->first;  // the last range reaches the top: grow it
        remove(offset);
      }
      top_ = offset + size;
      return offset;
    }
    const auto [length, offset] = *fit;
    remove(offset);
    if (length > size) add(offset + size, length - size);
    return offset;
  }

  void give(std::size_t offset, std::size_t size) {
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.end() && next->first == offset + size) {
      size += next->second;
      remove(next->first);
    }
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      const auto [start, length] = *std::prev(after);
      if (start + length == offset) {
        remove(start);
        offset = start;
        size += length;
      }
    }
    add(offset, size);
  }

  std::size_t top() const { return top_; }

 private:
  void add(std::size_t offset, std::size_t size) {
    by_offset_[offset] = size;
    by_size_.insert({size, offset});
  }
  void remove(std::size_t offset) {
    const auto it = by_offset_.find(offset);
    by_size_.erase({it->second, offset});
    by_offset_.erase(it);
  }
  std::map<std::size_t, std::size_t> by_offset_;
  std::set<std::pair<std::size_t, std::size_t>> by_size_;
  std::size_t top_ = 0;
};

/// In order of time, as an allocator would.
std::pair<std::vector<std::size_t>, std::size_t> pack_by_time(const std::vector<Block>& blocks) {
  std::vector<std::size_t> births(blocks.size()), deaths;
  for (std::size_t i = 0; i < births.size(); ++i) births[i] = i;
  deaths = births;
  std::stable_sort(births.begin(), births.end(), [&](std::size_t a, std::size_t b) {
    return blocks[a].begin != blocks[b].begin ? blocks[a].begin < blocks[b].begin
                                              : blocks[a].bytes > blocks[b].bytes;
  });
  std::stable_sort(deaths.begin(), deaths.end(),
                   [&](std::size_t a, std::size_t b) { return blocks[a].end < blocks[b].end; });
  std::vector<std::size_t> offsets(blocks.size(), 0);
  FreeList free;
  std::size_t dead = 0;
  for (const std::size_t i : births) {
    for (; dead < deaths.size() && blocks[deaths[dead]].end < blocks[i].begin; ++dead)
      if (blocks[deaths[dead]].bytes > 0)
        free.give(offsets[deaths[dead]], padded(blocks[deaths[dead]].bytes));
    if (blocks[i].bytes > 0) offsets[i] = free.take(padded(blocks[i].bytes));
  }
  return {std::move(offsets), free.top()};
}

}  // namespace

std::pair<std::vector<std::size_t>, std::size_t> pack(const std::vector<Block>& blocks) {
  auto by_time = pack_by_time(blocks);
  if (blocks.size() > kManyBlocks) return by_time;
  auto by_size = pack_by_size(blocks);
  return by_size.second <= by_time.second ? by_size : by_time;
}

namespace {

class Place {
 public:
  Place(Draft& draft, const StateLayout& state) : d_(draft), state_(state) {}

  void run() {
    count_uses();
    for (std::size_t s = 0; s < d_.plan.steps.size(); ++s) alias_in_place(static_cast<int>(s));
    place_feeds();
    place_state();
    place_constants();
    place_grads();
    place_arena();
    for (std::size_t i = 0; i < d_.plan.slots.size(); ++i) {
      const Slot& home = d_.slot(d_.home(static_cast<int>(i)));
      d_.plan.slots[i].region = home.region;
      d_.plan.slots[i].offset = home.offset;
    }
  }

 private:
  Step& step(int s) { return d_.plan.steps[static_cast<std::size_t>(s)]; }
  Clock& last_use(int home) { return last_use_[static_cast<std::size_t>(home)]; }

  void count_uses() {
    last_use_.assign(d_.plan.slots.size(), {-1, -1, -1});
    live_out_.assign(d_.plan.slots.size(), false);
    for (std::size_t s = 0; s < d_.plan.steps.size(); ++s)
      for (const auto* slots : {&d_.plan.steps[s].reads, &d_.plan.steps[s].writes})
        for (const int i : *slots)
          if (i >= 0)
            last_use(d_.home(i))[static_cast<std::size_t>(lane_index(d_.plan.steps[s].lane))] =
                static_cast<int>(s);
    for (std::size_t i = 0; i < d_.notes.size(); ++i)
      if (d_.notes[i].live_out) live_out_[static_cast<std::size_t>(d_.home(static_cast<int>(i)))] = true;
  }

  /// An output takes the memory of an operand that nobody needs after this step.
  void alias_in_place(int s) {
    if (!step(s).node) return;
    std::set<int> taken;
    for (const auto& [in, out] : d_.graph.node(step(s).node).op->traits.in_place) {
      if (static_cast<std::size_t>(in) >= step(s).reads.size() ||
          static_cast<std::size_t>(out) >= step(s).writes.size())
        continue;
      const int x = step(s).reads[static_cast<std::size_t>(in)],
                y = step(s).writes[static_cast<std::size_t>(out)];
      if (x < 0 || y < 0 || !may_alias(s, x, y) || !taken.insert(d_.home(x)).second) continue;
      merge(d_.home(x), y);
    }
  }

  bool may_alias(int s, int x, int y) {
    const int home = d_.home(x);
    const SlotNotes& result = d_.note(y);
    if (result.home != y || result.bucket >= 0 || result.writer != s ||
        live_out_[static_cast<std::size_t>(home)])
      return false;
    const Region region = d_.slot(home).region;
    if (region != Region::arena && region != Region::grads) return false;
    const SlotType &a = d_.slot(x).type, &b = d_.slot(y).type;
    if (a.dtype != b.dtype || a.layout != b.layout || a.numel() != b.numel()) return false;
    if (a.layout != Layout::dense && a.shape != b.shape) return false;
    int operands = 0;
    for (const int r : step(s).reads) operands += r >= 0 && d_.home(r) == home;
    if (operands != 1) return false;
    const Clock& before = d_.before[static_cast<std::size_t>(s)];
    for (std::size_t l = 0; l < kLanes; ++l)
      if (last_use(home)[l] > before[l] && last_use(home)[l] != s) return false;
    return true;
  }

  void merge(int home, int y) {
    d_.note(y).home = home;
    for (std::size_t l = 0; l < kLanes; ++l) last_use(home)[l] = std::max(last_use(home)[l], last_use(y)[l]);
    if (live_out_[static_cast<std::size_t>(y)]) live_out_[static_cast<std::size_t>(home)] = true;
  }

  static std::size_t append(Slot& slot, std::size_t& top) {
    slot.offset = top;
    return top += padded(slot.bytes);
  }

  void place_feeds() {
    for (Slot& slot : d_.plan.slots)
      if (slot.region == Region::feeds && slot.view_of < 0) append(slot, d_.plan.feeds_bytes);
  }

  void place_state() {
    for (Slot& slot : d_.plan.slots)
      if (slot.region == Region::state && slot.view_of < 0)
        slot.offset = state_.offsets.find(slot.name)->second.first;
    d_.plan.state_bytes = state_.bytes;
  }

  void place_constants() {
    std::map<std::string, std::vector<std::size_t>> known;  // by digest: places in plan.constants
    for (Slot& slot : d_.plan.slots) {
      if (slot.region != Region::constants || slot.view_of >= 0) continue;
      const HostTensor data = contents(d_.graph.value(slot.value));
      auto& places = known[data.digest()];
      const auto same = std::find_if(places.begin(), places.end(),
                                     [&](std::size_t i) { return d_.plan.constants[i].second == data; });
      if (same != places.end()) {
        slot.offset = d_.plan.constants[*same].first;
        continue;
      }
      append(slot, d_.plan.constants_bytes);
      places.push_back(d_.plan.constants.size());
      d_.plan.constants.emplace_back(slot.offset, data);
    }
  }

  /// Bound dimension polynomials are data.
  static HostTensor contents(const Value& value) {
    if (value.data) return *value.data;
    CHECK(value.ints, "constant '", value.name, "' has no contents");
    HostTensor data(value.type.dtype, static_shape(value.type.shape));
    CHECK(data.numel() == static_cast<std::int64_t>(value.ints->size()), "contents of '", value.name,
          "' do not fill it");
    for (std::size_t i = 0; i < value.ints->size(); ++i) {
      const std::int64_t number = (*value.ints)[i].value();
      if (value.type.dtype == DType::i64) {
        data.mutable_data<std::int64_t>()[i] = number;  // exact beyond 2^53
      } else {
        data.set_double(static_cast<std::int64_t>(i), static_cast<double>(number));
      }
    }
    return data;
  }

  /// One stretch per all-reduce, so that it is one call.
  void place_grads() {
    for (const std::vector<int>& bucket : d_.buckets)
      for (const int slot : bucket) append(d_.slot(slot), d_.plan.grads_bytes);
  }

  void place_arena() {
    index_lanes();
    std::vector<Block> blocks;
    std::vector<int> block_of(d_.plan.slots.size(), -1), scratch_of(d_.plan.steps.size(), -1);
    const int end = static_cast<int>(d_.plan.steps.size());
    for (std::size_t s = 0; s < d_.plan.steps.size(); ++s) {
      const int at = static_cast<int>(s);
      const int begin = earliest(at), last = latest(at);
      for (const auto* slots : {&d_.plan.steps[s].reads, &d_.plan.steps[s].writes})
        for (const int i : *slots) {
          if (i < 0 || d_.slot(d_.home(i)).region != Region::arena) continue;
          const std::size_t home = static_cast<std::size_t>(d_.home(i));
          if (block_of[home] < 0) {
            block_of[home] = static_cast<int>(blocks.size());
            blocks.push_back({d_.plan.slots[home].bytes, begin, live_out_[home] ? end : last});
          }
          Block& block = blocks[static_cast<std::size_t>(block_of[home])];
          block.begin = std::min(block.begin, begin);
          block.end = std::max(block.end, last);
        }
      if (d_.plan.steps[s].scratch_bytes > 0) {
        scratch_of[s] = static_cast<int>(blocks.size());
        blocks.push_back({d_.plan.steps[s].scratch_bytes, begin, last});
      }
    }
    const auto [offsets, total] = pack(blocks);
    for (std::size_t i = 0; i < block_of.size(); ++i)
      if (block_of[i] >= 0) d_.plan.slots[i].offset = offsets[static_cast<std::size_t>(block_of[i])];
    for (std::size_t s = 0; s < scratch_of.size(); ++s)
      if (scratch_of[s] >= 0)
        d_.plan.steps[s].scratch_offset = offsets[static_cast<std::size_t>(scratch_of[s])];
    d_.plan.arena_bytes = total;
  }

  void index_lanes() {
    for (std::size_t s = 0; s < d_.plan.steps.size(); ++s)
      lanes_[static_cast<std::size_t>(lane_index(d_.plan.steps[s].lane))].push_back(static_cast<int>(s));
  }

  // The time of a step is its place in the plan. A step of the comm or copy lane takes up, beside its own
  // place, those of the lanes before its own (by number) that may run at the same time: then two blocks whose
  // times are disjoint are used by steps that are ordered, whichever lanes they are on.

  /// The first such place of step s.
  int earliest(int s) {
    int first = s;
    const std::size_t own = static_cast<std::size_t>(lane_index(step(s).lane));
    for (std::size_t l = 0; l < own; ++l) {
      const auto it =
          std::upper_bound(lanes_[l].begin(), lanes_[l].end(), d_.before[static_cast<std::size_t>(s)][l]);
      if (it != lanes_[l].end()) first = std::min(first, *it);
    }
    return first;
  }

  /// The last such place of step s.
  int latest(int s) {
    const std::size_t own = static_cast<std::size_t>(lane_index(step(s).lane));
    int last = s;
    for (std::size_t l = 0; l < own; ++l) {
      const auto it = std::partition_point(lanes_[l].begin(), lanes_[l].end(), [&](int t) {
        return d_.before[static_cast<std::size_t>(t)][own] < s;
      });
      if (it != lanes_[l].begin()) last = std::max(last, *std::prev(it));
    }
    return last;
  }

  Draft& d_;
  const StateLayout& state_;
  std::vector<Clock> last_use_;                 // by home slot
  std::vector<bool> live_out_;                  // by home slot
  std::array<std::vector<int>, kLanes> lanes_;  // steps of each lane
};

}  // namespace

void place(Draft& draft, const StateLayout& state) { Place(draft, state).run(); }

}  // namespace onnxddp

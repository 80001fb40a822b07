// make_plan: the stages in order; and the plan as text.
#include "executor/plan/plan.h"

#include <algorithm>
#include <cstdio>

#include "executor/plan/draft.h"

namespace onnxddp {

std::string_view region_name(Region region) {
  switch (region) {
    case Region::feeds: return "feeds";
    case Region::state: return "state";
    case Region::grads: return "grads";
    case Region::arena: return "arena";
    case Region::constants: return "constants";
    case Region::none: break;
  }
  return "none";
}

void add_states(const Graph& graph, StateLayout& state) {
  for (const ValueId id : graph.params) {
    const Value& value = graph.value(id);
    if (!is_static(value.type.shape)) {
      throw Error(
          cat("'", value.name, "' persists between steps, so its shape must be known before the first one"))
          .at(cat(value.name, ": ", value.type));
    }
    const std::size_t bytes =
        SlotType{value.type.dtype, static_shape(value.type.shape), Layout::dense}.bytes();
    const auto [it, fresh] = state.offsets.try_emplace(value.name, state.bytes, bytes);
    if (fresh) {
      state.bytes += padded(bytes);
    } else if (it->second.second != bytes) {
      throw Error(
          cat("'", value.name, "' has ", bytes, " bytes here and ", it->second.second, " in another program"))
          .at(cat(value.name, ": ", value.type));
    }
  }
}

Plan make_plan(const Graph& graph, const Device& device, StateLayout& state) {
  add_states(graph, state);
  Draft draft(graph, device);
  draft.plan.name = graph.name;
  draft.plan.device = device.kind();
  lay_out(draft);
  put_in_order(draft);
  place(draft, state);
  plan_check(draft.plan);  // a sixth of the time, and no plan is wrong in silence
  return std::move(draft.plan);
}

namespace {

std::string size_str(std::size_t bytes) {
  if (bytes < 1024) return cat(bytes, "B");
  const bool mib = bytes >= 1024 * 1024;
  char text[32];
  std::snprintf(text, sizeof text, mib ? "%.1fMiB" : "%.1fKiB",
                static_cast<double>(bytes) / (mib ? 1024. * 1024. : 1024.));
  return text;
}

/// `a+128`, `g+0`; state slots are known by name.
std::string address(const Slot& slot) {
  if (slot.region == Region::state) return "state";
  return cat(region_name(slot.region)[0], "+", slot.offset);
}

class Dump {
 public:
  explicit Dump(const Plan& plan) : plan_(plan) {
    for (const Slot& slot : plan.slots)  // the first slot at a place of the state is the param itself
      if (slot.region == Region::state && slot.bytes > 0) owners_.try_emplace(slot.offset, slot.name);
  }

  std::string text() const {
    std::string out = header();
    std::vector<std::vector<std::string>> rows = {{"#", "lane", "op", "reads", "writes", "at", "waits"}};
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) rows.push_back(row(s));
    std::vector<std::size_t> widths(rows[0].size(), 0);
    for (const auto& cells : rows)
      for (std::size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
    for (const auto& cells : rows) {
      std::string line(2 + widths[0] - cells[0].size(), ' ');
      line += cells[0];
      for (std::size_t i = 1; i < cells.size(); ++i)
        line += cat("  ", cells[i], std::string(widths[i] - cells[i].size(), ' '));
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + "\n";
    }
    for (const Slot& slot : plan_.slots)
      if (slot.view_of >= 0) out += cat("  view ", slot.name, " of ", at(slot.view_of).name, "\n");
    return out;
  }

 private:
  const Slot& at(int i) const { return plan_.slots[static_cast<std::size_t>(i)]; }

  std::string header() const {
    std::string out = cat("plan ", plan_.name);
    for (const auto& [name, value] : plan_.dims) out += cat(" ", name, "=", value);
    return out + cat(" device=", plan_.device, " state=", size_str(plan_.state_bytes),
                     " grads=", size_str(plan_.grads_bytes), " arena=", size_str(plan_.arena_bytes),
                     " steps=", plan_.steps.size(), " collectives=", plan_.collectives, "\n");
  }

  static std::string_view lane_name(Lane lane) {
    return lane == Lane::compute ? "compute" : lane == Lane::comm ? "comm" : "copy";
  }

  /// Whether every result is its operand's bytes: a reduction.
  bool reduces_in_place(const Step& step) const {
    if (step.lane != Lane::comm || step.reads.size() != step.writes.size()) return false;
    for (std::size_t i = 0; i < step.reads.size(); ++i) {
      if (step.reads[i] < 0 || step.writes[i] < 0) return false;
      const Slot &x = at(step.reads[i]), &y = at(step.writes[i]);
      if (x.region != y.region || x.offset != y.offset) return false;
    }
    return true;
  }

  /// A value in a param's memory goes by the param's name.
  std::string written(const Slot& slot) const {
    if (slot.region != Region::state) return slot.name;
    const auto it = owners_.find(slot.offset);
    return it == owners_.end() ? slot.name : it->second;
  }

  std::vector<std::string> row(std::size_t index) const {
    const Step& step = plan_.steps[index];
    std::string reads, writes, places, waits;
    const auto add = [](std::string& cell, const std::string& word) {
      cell += cell.empty() ? word : " " + word;
    };
    for (const int i : step.reads) add(reads, i < 0 ? "_" : at(i).name);
    std::string last;
    for (const int i : step.writes) {
      if (i < 0) {
        add(writes, "_");
        continue;
      }
      add(writes, written(at(i)));
      const std::string place = address(at(i));
      if (place != last) add(places, place);
      last = place;
    }
    if (reduces_in_place(step)) {
      writes = "in place";
      places = address(at(step.writes[0]));
    }
    for (const int w : step.waits) add(waits, cat(w));
    return {cat(index), std::string(lane_name(step.lane)), step.op, reads, writes, places, waits};
  }

  const Plan& plan_;
  std::map<std::size_t, std::string> owners_;  // state offset -> name
};

}  // namespace

std::string dump(const Plan& plan) { return Dump(plan).text(); }

}  // namespace onnxddp

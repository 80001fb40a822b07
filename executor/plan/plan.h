// The static plan: steps in order on lanes, slots in regions, waits. dump(plan) is `show --stage plan`.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "executor/device.h"
#include "executor/kernel.h"
#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

/// feeds: inputs of the step. state: params and states, shared by all plans of a session. grads: collective
/// buckets. arena: everything that lives within a step. constants: read-only data.
enum class Region : std::uint8_t { feeds, state, grads, arena, constants, none };
std::string_view region_name(Region region);

struct Slot {
  std::string name;  // value name (reordered copies: name@nhwc)
  SlotType type;
  Region region = Region::none;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  ValueId value;
  int view_of = -1;  // the slot whose bytes this one shows under another shape (Reshape); no step writes it
};

struct Step {
  std::string op;
  Lane lane = Lane::compute;
  std::vector<int> reads, writes;                     // slot indices; -1: absent
  std::vector<int> waits;                             // steps of other lanes that must be finished before
  std::size_t scratch_offset = 0, scratch_bytes = 0;  // in the arena
  Run run;
  NodeId node;  // absent for reorders
  std::string origin;
};

/// The layout of the persistent regions: fixed by the first plan of a session and shared by the others.
struct StateLayout {
  std::map<std::string, std::pair<std::size_t, std::size_t>, std::less<>> offsets;  // name -> offset, bytes
  std::size_t bytes = 0;
};

struct Plan {
  std::string name, device;
  std::vector<Slot> slots;
  std::vector<Step> steps;
  std::map<std::string, int, std::less<>> inputs, outputs;  // name -> slot
  std::size_t feeds_bytes = 0, state_bytes = 0, grads_bytes = 0, arena_bytes = 0, constants_bytes = 0;
  int collectives = 0;
  DimBindings dims;  // what the symbols were bound to, for dump; filled by who bound them
  /// Contents of the constants region by offset; equal bytes are there once.
  std::vector<std::pair<std::size_t, HostTensor>> constants;
};

/// Appends the graph's params and states to the layout, in order of declaration, each padded to 64 bytes.
/// Throws Error when a name is there with another size.
void add_states(const Graph& graph, StateLayout& state);

/// Builds the plan of a graph whose dimensions are all bound. `state` is read for names it holds and extended
/// by new ones. Throws Error when the device has no kernel for an op and dtype. Every plan passes plan_check.
Plan make_plan(const Graph& graph, const Device& device, StateLayout& state);

/// Throws InternalError unless any two steps that touch the same bytes, one writing, are ordered by lane or
/// wait, nothing is read before it is written, no reduced slot is read as local afterwards.
void plan_check(const Plan& plan);
/// Throws InternalError unless the plans of all ranks issue the same collectives, with operands of the same
/// sizes, in the same order.
void plan_check_ranks(const std::vector<const Plan*>& ranks);

std::string dump(const Plan& plan);

}  // namespace onnxddp

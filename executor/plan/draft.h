// A plan in the making: slots and steps first (layout.cpp), then order and waits (order.cpp), then memory
// (memory.cpp).
#pragma once

#include <array>
#include <vector>

#include "executor/operands.h"
#include "executor/plan/plan.h"

namespace ONNXDDP_API onnxddp {

constexpr int kLanes = 3;
/// For every lane the index of its last step that is known to be finished (-1: none).
using Clock = std::array<int, kLanes>;
inline int lane_index(Lane lane) { return static_cast<int>(lane); }

/// What the stages know about a slot beside the plan's Slot.
struct SlotNotes {
  int home = -1;          // the slot whose memory this one uses (itself, or one that it is an alias of)
  int bucket = -1;        // number of the all-reduce whose bucket it lives in
  bool live_out = false;  // read after the last step
  int writer = -1;        // first step that writes it
};

/// `update param <- source`, as slots.
struct SlotUpdate {
  int param = -1, source = -1;
  bool aliased = false;  // the source lives in the param's memory: nothing to copy
};

struct Draft {
  Draft(const Graph& g, const Device& d) : graph(g), device(d), slot_of(g.value_count(), {-1, -1}) {}

  const Graph& graph;
  const Device& device;
  Plan plan;
  std::vector<SlotNotes> notes;             // by slot
  std::vector<std::array<int, 2>> slot_of;  // by value and layout
  std::vector<SlotUpdate> updates;
  std::vector<std::vector<int>> buckets;  // slots of each all-reduce, in order of its operands
  std::vector<Clock> before;              // by step: what is finished when it starts

  Slot& slot(int i) { return plan.slots[static_cast<std::size_t>(i)]; }
  SlotNotes& note(int i) { return notes[static_cast<std::size_t>(i)]; }
  /// The slot whose memory slot i uses, through chains of aliases.
  int home(int i) {
    while (note(i).home != i) i = note(i).home;
    return i;
  }
  /// Adds `Reorder` or `Copy` of a slot as a step; returns the new step's index.
  int add_move(const std::string& op, int from, int to);
};

/// Whether N,H,W,C order of this shape is the same bytes as N,C,H,W order.
bool layouts_agree(const Ints& shape);

/// Fills slots and steps: kernels, layouts, reorders, bucket copies, what outputs and updates need. No memory
/// yet.
void lay_out(Draft& draft);
/// Sets waits and clocks of all steps, decides which updates happen in place, and appends copies for the
/// others.
void put_in_order(Draft& draft);
/// Gives every slot and scratch its region and offset.
void place(Draft& draft, const StateLayout& state);

/// A block of memory that is used from step `begin` to step `end`, both included.
struct Block {
  std::size_t bytes = 0;
  int begin = 0, end = 0;
};
/// Offsets (multiples of 64) such that blocks whose times overlap do not share bytes, and the size of the
/// whole. Biggest first into the tightest gap; beyond a few thousand blocks in order of time, which takes n
/// log n.
std::pair<std::vector<std::size_t>, std::size_t> pack(const std::vector<Block>& blocks);

}  // namespace onnxddp

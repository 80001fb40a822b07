// Which kernel, which layout: turns nodes into steps over slots, and puts reorders where a layout changes
// hands.
#include <algorithm>
#include <set>

#include "executor/plan/draft.h"
#include "graph/op.h"

namespace onnxddp {

bool layouts_agree(const Ints& shape) {
  return shape.size() != 4 || shape[1] == 1 || shape[2] * shape[3] == 1 || numel(shape) == 0;
}

namespace {

std::string place_of(const Graph& graph, const Node& node) {
  if (!node.origin.empty()) return node.origin;
  for (const ValueId y : node.outputs)
    if (y) return cat(node.op->name, " '", graph.value(y).name, "'");
  return node.op->name;
}

std::string types_of(const Graph& graph, const Node& node) {
  std::string out;
  for (const ValueId x : node.inputs)
    if (x) out += cat(out.empty() ? "" : ", ", graph.value(x).name, ": ", graph.value(x).type);
  return out;
}

/// The dtype that chooses the kernel: of the first floating operand, else of the first, else of the result.
DType kernel_dtype(const Graph& graph, const Node& node) {
  std::optional<DType> first;
  for (const ValueId x : node.inputs) {
    if (!x) continue;
    const DType dtype = graph.value(x).type.dtype;
    if (is_float(dtype)) return dtype;
    if (!first) first = dtype;
  }
  if (first) return *first;
  return node.outputs.empty() ? DType::f32 : graph.value(node.outputs[0]).type.dtype;
}

const Kernel& kernel_for(const Draft& d, const Node& node) {
  const DType dtype = kernel_dtype(d.graph, node);
  if (const Kernel* kernel = d.device.kernels().find(node.op->name, dtype)) return *kernel;
  throw Error(cat("there is no ", d.device.kind(), " kernel for ", node.op->name, " of ", dtype_name(dtype)))
      .at(types_of(d.graph, node))
      .in(place_of(d.graph, node))
      .hint("`onnx-ddp ops` lists what each device has");
}

/// Ops whose result is the operand's bytes under another shape.
bool is_view(const Node& node) { return node.op->name == "Reshape" || node.op->name == "Identity"; }

class LayOut {
 public:
  explicit LayOut(Draft& draft) : d_(draft), g_(draft.graph) {}

  void run() {
    index_uses();
    for (const ValueId id : g_.inputs) define(id, Layout::dense, Region::feeds);
    for (const ValueId id : g_.params) define(id, Layout::dense, Region::state);
    for (const NodeId id : g_.order) add_node(id);
    add_outputs();
    add_updates();
  }

 private:
  void index_uses() {
    position_.assign(g_.node_count(), -1);
    for (std::size_t i = 0; i < g_.order.size(); ++i)
      position_[static_cast<std::size_t>(g_.order[i].index)] = static_cast<int>(i);
    users_ = g_.users();
    for (const Output& output : g_.outputs) kept_.insert(output.value);
    for (const Update& update : g_.updates) kept_.insert(update.next);
  }

  int add_slot(ValueId id, Layout layout, Region region, const std::string& suffix = {}) {
    const Value& value = g_.value(id);
    Slot slot;
    slot.name = value.name + suffix;
    slot.type = {value.type.dtype, static_shape(value.type.shape), layout};
    slot.region = region;
    slot.bytes = slot.type.bytes();
    slot.value = id;
    const int index = static_cast<int>(d_.plan.slots.size());
    d_.plan.slots.push_back(std::move(slot));
    d_.notes.push_back({.home = index});
    return index;
  }

  /// Adds the slot that readers of the value in this layout find; one-channel and one-pixel values serve both
  /// layouts.
  int define(ValueId id, Layout layout, Region region, const std::string& suffix = {}) {
    const int index = add_slot(id, layout, region, suffix);
    auto& of = d_.slot_of[static_cast<std::size_t>(id.index)];
    of[static_cast<std::size_t>(layout)] = index;
    if (layouts_agree(d_.slot(index).type.shape)) of = {index, index};
    return index;
  }

  /// The slot of a value in a layout; a reorder step makes it if the value is there in the other one only.
  int slot_for(ValueId id, Layout layout) {
    auto& of = d_.slot_of[static_cast<std::size_t>(id.index)];
    if (of[0] < 0 && of[1] < 0) {
      CHECK(g_.is_constant(id), "'", g_.value(id).name, "' is read before it is computed");
      define(id, Layout::dense, Region::constants);
    }
    const std::size_t want = static_cast<std::size_t>(layout);
    if (of[want] < 0) {
      const int from = of[1 - want];
      const int to = define(id, layout, Region::arena, layout == Layout::nhwc ? "@nhwc" : "@dense");
      d_.add_move("Reorder", from, to);
    }
    return of[want];
  }

  /// The layout in which a value is at hand: N,H,W,C if it is there.
  SlotType type_at_hand(ValueId id) const {
    const Value& value = g_.value(id);
    SlotType type{value.type.dtype, static_shape(value.type.shape), Layout::dense};
    const auto& of = d_.slot_of[static_cast<std::size_t>(id.index)];
    if (of[1] >= 0 && of[1] != of[0]) type.layout = Layout::nhwc;
    return type;
  }

  PlanContext context_for(const Node& node) const {
    std::vector<SlotType> inputs, outputs;
    for (const ValueId x : node.inputs)
      inputs.push_back(x ? type_at_hand(x) : SlotType{DType::f32, {0}, Layout::dense});
    for (const ValueId y : node.outputs) {
      SlotType type{DType::f32, {0}, Layout::dense};
      if (y) type = {g_.value(y).type.dtype, static_shape(g_.value(y).type.shape), Layout::dense};
      outputs.push_back(std::move(type));
    }
    return PlanContext(g_, node, std::move(inputs), std::move(outputs), d_.device.threads());
  }

  /// Elementwise ops compute in N,H,W,C when an operand of the result's shape is there: its convolution wants
  /// it so.
  static void follow(PlanContext& c) {
    for (SlotType& y : c.outputs) {
      if (y.shape.size() != 4) continue;
      for (const SlotType& x : c.inputs)
        if (x.shape == y.shape && x.layout == Layout::nhwc) y.layout = Layout::nhwc;
    }
    for (SlotType& x : c.inputs) {
      Layout wanted = Layout::dense;
      for (const SlotType& y : c.outputs)
        if (x.shape == y.shape && y.layout == Layout::nhwc) wanted = Layout::nhwc;
      x.layout = wanted;
    }
  }

  static void choose_layouts(const Kernel& kernel, PlanContext& c) {
    if (kernel.rule == LayoutRule::follow) return follow(c);
    LayoutChoice choice;
    if (kernel.rule == LayoutRule::choose) {
      CHECK(kernel.layouts, "kernel ", kernel.op, " chooses layouts but has no function for it");
      choice = kernel.layouts(c);
    }
    choice.inputs.resize(c.inputs.size(), Layout::dense);
    choice.outputs.resize(c.outputs.size(), Layout::dense);
    for (std::size_t i = 0; i < c.inputs.size(); ++i) c.inputs[i].layout = choice.inputs[i];
    for (std::size_t i = 0; i < c.outputs.size(); ++i) c.outputs[i].layout = choice.outputs[i];
  }

  void add_view(const Node& node) {
    const int from = slot_for(node.inputs[0], Layout::dense);
    const int root = d_.slot(from).view_of < 0 ? from : d_.slot(from).view_of;
    const int slot = define(node.outputs[0], Layout::dense, d_.slot(root).region);
    d_.slot(slot).view_of = root;
    d_.note(slot).home = root;
  }

  void add_node(NodeId id) {
    const Node& node = g_.node(id);
    if (is_view(node)) return add_view(node);
    const Kernel& kernel = kernel_for(d_, node);
    PlanContext context = context_for(node);
    choose_layouts(kernel, context);
    Step step;
    step.op = node.op->name;
    step.lane = node.op->traits.lane;
    step.node = id;
    step.origin = place_of(g_, node);
    for (std::size_t i = 0; i < node.inputs.size(); ++i)
      step.reads.push_back(node.inputs[i] ? slot_for(node.inputs[i], context.inputs[i].layout) : -1);
    if (step.op == "AllReduce") fill_bucket(id, node, step);
    const int index = static_cast<int>(d_.plan.steps.size());
    for (std::size_t i = 0; i < node.outputs.size(); ++i)
      step.writes.push_back(add_result(node, i, context, index));
    if (step.op == "AllReduce")
      for (std::size_t i = 0; i < step.writes.size(); ++i) d_.note(step.writes[i]).home = step.reads[i];
    try {
      step.run = kernel.prepare(context);
    } catch (Error& error) {
      error.add_in(step.origin);
      throw;
    }
    step.scratch_bytes = context.scratch_bytes;
    if (node.op->traits.collective) ++d_.plan.collectives;
    d_.plan.steps.push_back(std::move(step));
  }

  int add_result(const Node& node, std::size_t i, const PlanContext& context, int step) {
    if (!node.outputs[i]) return -1;
    const bool same = layouts_agree(context.outputs[i].shape);
    const int slot = define(node.outputs[i], same ? Layout::dense : context.outputs[i].layout, Region::arena);
    d_.note(slot).writer = step;
    return slot;
  }

  /// Whether the operand may live in the bucket itself: after the reduction nobody may want the local value.
  bool fits_bucket(NodeId reduce, ValueId id, int slot) {
    const Value& value = g_.value(id);
    if (value.kind != Kind::computed || kept_.count(id) || d_.slot(slot).region != Region::arena)
      return false;
    if (d_.note(slot).home != slot || d_.note(slot).bucket >= 0) return false;
    int operands = 0;
    for (const NodeId user : users_[static_cast<std::size_t>(id.index)]) {
      if (is_view(g_.node(user))) return false;
      if (user == reduce ? ++operands > 1 : position(user) > position(reduce)) return false;
    }
    const int writer = d_.note(slot).writer;
    return writer >= 0 && d_.plan.steps[static_cast<std::size_t>(writer)].lane == Lane::compute;
  }

  void fill_bucket(NodeId id, const Node& node, Step& step) {
    CHECK(node.inputs.size() == node.outputs.size(), "AllReduce must have as many outputs as inputs");
    const int bucket = static_cast<int>(d_.buckets.size());
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
      int slot = step.reads[i];
      if (!fits_bucket(id, node.inputs[i], slot)) {
        const int copy = add_slot(node.inputs[i], Layout::dense, Region::grads, "@bucket");
        d_.add_move("Copy", slot, copy);
        slot = copy;
      }
      d_.slot(slot).region = Region::grads;
      d_.note(slot).bucket = bucket;
      step.reads[i] = slot;
    }
    d_.buckets.push_back(step.reads);
  }

  /// Outputs are dense; one that shows a param which this step changes is its value before the change.
  void add_outputs() {
    for (const Output& output : g_.outputs) {
      int slot = slot_for(output.value, Layout::dense);
      if (changes(slot)) {
        const int copy = add_slot(output.value, Layout::dense, Region::arena, "@out");
        d_.add_move("Copy", slot, copy);
        slot = copy;
      }
      d_.note(slot).live_out = true;
      d_.plan.outputs[output.name] = slot;
    }
    for (const ValueId id : g_.inputs) d_.plan.inputs[g_.value(id).name] = slot_for(id, Layout::dense);
  }

  /// Whether the slot shows memory of a param that has an update.
  bool changes(int slot) {
    const int root = d_.home(slot);
    const Slot& s = d_.slot(root);
    return s.region == Region::state && g_.update_of(s.value);
  }

  void add_updates() {
    std::map<int, int> old;  // updates happen all at once: sources that change themselves are saved first
    for (const Update& update : g_.updates) {
      const int param = slot_for(update.param, Layout::dense);
      int source = slot_for(update.next, Layout::dense);
      if (d_.home(source) == param) continue;
      if (changes(source)) {
        auto [it, fresh] = old.try_emplace(source, -1);
        if (fresh) {
          it->second = add_slot(update.next, Layout::dense, Region::arena, "@old");
          d_.add_move("Copy", source, it->second);
        }
        source = it->second;
      }
      d_.updates.push_back({param, source, false});
    }
  }

  int position(NodeId id) const { return position_[static_cast<std::size_t>(id.index)]; }

  Draft& d_;
  const Graph& g_;
  std::vector<int> position_;  // by node: place in the order
  std::vector<std::vector<NodeId>> users_;
  std::set<ValueId> kept_;  // read after the last node
};

}  // namespace

int Draft::add_move(const std::string& op, int from, int to) {
  const SlotType in = slot(from).type, out = slot(to).type;
  const Kernel* kernel = device.kernels().find(op, in.dtype);
  CHECK(kernel, "device ", device.name(), " has no kernel ", op, " for ", dtype_name(in.dtype));
  Node node;
  node.inputs = {slot(from).value};
  node.outputs = {slot(to).value};
  PlanContext context(graph, node, {in}, {out}, device.threads());
  Step step;
  step.op = op;
  step.reads = {from};
  step.writes = {to};
  step.origin = cat(op, " of '", slot(from).name, "'");
  step.run = kernel->prepare(context);
  step.scratch_bytes = context.scratch_bytes;
  plan.steps.push_back(std::move(step));
  const int index = static_cast<int>(plan.steps.size()) - 1;
  if (note(to).writer < 0) note(to).writer = index;
  return index;
}

void lay_out(Draft& draft) { LayOut(draft).run(); }

}  // namespace onnxddp

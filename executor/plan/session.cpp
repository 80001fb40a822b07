#include "executor/plan/session.h"

#include <algorithm>
#include <list>

#include "executor/plan/binding.h"
#include "executor/plan/lanes.h"
#include "graph/pass.h"

namespace onnxddp {
namespace {

constexpr std::size_t kCachedPlans = 8;
/// Up to so many bytes per step collectives run on the compute thread, in the plan's order: handing them to
/// another thread would cost more than it could hide.
constexpr std::size_t kSmallCollectives = 32 * 1024;

/// Device memory of one owner.
class Memory {
 public:
  explicit Memory(Device& device) : device_(&device) {}
  Memory(Memory&& other) noexcept : device_(other.device_), data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (data_) device_->free(data_);
  }
  /// Makes room for that many bytes; the contents are lost if it grows.
  void grow(std::size_t bytes) {
    if (bytes <= bytes_) return;
    if (data_) device_->free(std::exchange(data_, nullptr));
    bytes_ = 0;
    data_ = static_cast<std::byte*>(device_->allocate(bytes));
    bytes_ = bytes;
  }
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  Device* device_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A plan with its pointers.
struct Prepared {
  explicit Prepared(Device& device) : constants(device) {}
  Plan plan;
  Memory constants;
  std::uint64_t generation = 0;  // of the session's memory that the pointers are for
  std::vector<void*> pointers;   // of all steps' operands
  std::vector<Call> calls, collectives;
  std::vector<const Slot*> feeds;  // in order of the program's inputs by name
  std::vector<void*> feed_pointers;
};

struct Program {
  Graph graph;
  Inputs inputs;  // by name
  std::vector<std::string> symbols;
  std::list<Prepared> plans;  // most recently used first
};

}  // namespace

struct Session::Impl {
  Impl(Device& d, Communicator& c)
      : device(d), communicator(c), state(d), feeds(d), grads(d), arena(d), lanes(c) {}

  struct State {
    TensorType type;
    std::size_t offset = 0, bytes = 0;
  };

  Device& device;
  Communicator& communicator;
  StateLayout layout;
  std::map<std::string, State, std::less<>> states;
  std::map<std::string, Program, std::less<>> programs;
  Memory state, feeds, grads, arena;
  std::uint64_t generation = 1;  // changes whenever one of them moves
  Lanes lanes;

  Program& program(const std::string& name) {
    const auto it = programs.find(name);
    CHECK(it != programs.end(), "no program '", name, "'");
    return it->second;
  }

  const State& find_state(const std::string& name) const {
    const auto it = states.find(name);
    if (it == states.end())
      throw Error(cat("no program has a tensor '", name, "' that persists between steps"));
    return it->second;
  }

  void add_program(const std::string& name, const Graph& graph) {
    CHECK(!programs.count(name), "program '", name, "' is there already");
    for (const ValueId id : graph.params) {
      const Value& value = graph.value(id);
      const auto it = states.find(value.name);
      if (it != states.end() && it->second.type != value.type)
        throw Error(cat("'", value.name, "' is ", value.type, " in '", name, "' and ", it->second.type,
                        " in another program"));
    }
    StateLayout grown = layout;
    add_states(graph, grown);
    grow_state(grown.bytes);
    layout = std::move(grown);
    for (const ValueId id : graph.params) {
      const Value& value = graph.value(id);
      const auto [offset, bytes] = layout.offsets.find(value.name)->second;
      states[value.name] = {value.type, offset, bytes};
    }
    Program& program = programs[name];
    program.graph = graph;
    for (const ValueId id : graph.inputs)
      program.inputs.emplace_back(graph.value(id).name, graph.value(id).type);
    std::sort(program.inputs.begin(), program.inputs.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    program.symbols = free_symbols(graph);
  }

  void grow_state(std::size_t bytes) {
    if (bytes <= state.bytes()) return;
    Memory larger(device);
    larger.grow(bytes);
    std::vector<std::byte> host(state.bytes());
    if (!host.empty()) {
      device.download(host.data(), state.data(), host.size());
      device.upload(larger.data(), host.data(), host.size());
    }
    state = std::move(larger);
    ++generation;
  }

  /// The plan for these dimensions, at the front of the program's list.
  Prepared& prepare(Program& program, const DimBindings& dims) {
    const auto it = std::find_if(program.plans.begin(), program.plans.end(),
                                 [&](const Prepared& p) { return p.plan.dims == dims; });
    if (it != program.plans.end()) {
      program.plans.splice(program.plans.begin(), program.plans, it);
      return program.plans.front();
    }
    Graph bound = program.graph;
    bind_dims(bound, dims);
    Prepared made(device);
    made.plan = make_plan(bound, device, layout);
    made.plan.dims = dims;
    made.constants.grow(made.plan.constants_bytes);
    for (const auto& [offset, data] : made.plan.constants)
      if (data.bytes() > 0) device.upload(made.constants.data() + offset, data.raw(), data.bytes());
    made.plan.constants.clear();  // they are on the device now
    program.plans.push_front(std::move(made));
    if (program.plans.size() > kCachedPlans) program.plans.pop_back();
    reserve(program.plans.front().plan);
    return program.plans.front();
  }

  /// Plans share this memory: it is as large as the largest needs.
  void reserve(const Plan& plan) {
    if (plan.feeds_bytes <= feeds.bytes() && plan.grads_bytes <= grads.bytes() &&
        plan.arena_bytes <= arena.bytes())
      return;
    ++generation;
    feeds.grow(plan.feeds_bytes);
    grads.grow(plan.grads_bytes);
    arena.grow(plan.arena_bytes);
  }

  void* address(const Prepared& p, const Slot& slot) const {
    switch (slot.region) {
      case Region::feeds: return feeds.data() + slot.offset;
      case Region::state: return state.data() + slot.offset;
      case Region::grads: return grads.data() + slot.offset;
      case Region::arena: return arena.data() + slot.offset;
      case Region::constants: return p.constants.data() + slot.offset;
      case Region::none: break;
    }
    return nullptr;
  }

  /// Fills the tables of pointers; again when memory has moved.
  void connect(const Program& program, Prepared& p) {
    const auto slot = [&](int i) -> const Slot& { return p.plan.slots[static_cast<std::size_t>(i)]; };
    std::size_t operands = 0;
    for (const Step& step : p.plan.steps) operands += step.reads.size() + step.writes.size();
    p.pointers.assign(operands, nullptr);
    p.calls.clear();
    p.collectives.clear();
    const std::vector<bool> apart = on_comm_thread(p.plan);
    void** next = p.pointers.data();
    for (std::size_t s = 0; s < p.plan.steps.size(); ++s) {
      const Step& step = p.plan.steps[s];
      Call call;
      call.run = &step.run;
      call.step = &step;
      call.number = static_cast<int>(s);
      call.context.inputs = next;
      for (const int r : step.reads) *next++ = r < 0 ? nullptr : address(p, slot(r));
      call.context.outputs = next;
      for (const int w : step.writes) *next++ = w < 0 ? nullptr : address(p, slot(w));
      call.context.scratch = step.scratch_bytes > 0 ? arena.data() + step.scratch_offset : nullptr;
      call.context.communicator = &communicator;
      for (const int w : step.waits)
        if (apart[s] != apart[static_cast<std::size_t>(w)]) call.wait = std::max(call.wait, w);
      (apart[s] ? p.collectives : p.calls).push_back(call);
    }
    for (const auto& [one, other] :
         {std::pair(&p.calls, &p.collectives), std::pair(&p.collectives, &p.calls)})
      mark_awaited(*one, *other);
    p.feeds.clear();
    p.feed_pointers.clear();
    for (const auto& [name, type] : program.inputs) {
      p.feeds.push_back(&slot(p.plan.inputs.find(name)->second));
      p.feed_pointers.push_back(address(p, *p.feeds.back()));
    }
    p.generation = generation;
  }

  std::vector<bool> on_comm_thread(const Plan& plan) const {
    std::vector<bool> apart(plan.steps.size(), false);
    std::size_t bytes = 0;
    for (std::size_t s = 0; s < plan.steps.size(); ++s) {
      apart[s] = plan.steps[s].lane == Lane::comm;
      if (!apart[s]) continue;
      for (const int r : plan.steps[s].reads)
        if (r >= 0) bytes += plan.slots[static_cast<std::size_t>(r)].bytes;
    }
    if (communicator.size() == 1 || bytes <= kSmallCollectives) apart.assign(apart.size(), false);
    return apart;
  }

  static void mark_awaited(std::vector<Call>& calls, const std::vector<Call>& others) {
    for (const Call& other : others) {
      if (other.wait < 0) continue;
      const auto it = std::lower_bound(calls.begin(), calls.end(), other.wait,
                                       [](const Call& call, int number) { return call.number < number; });
      it->awaited = true;
    }
  }

  /// Whether the plan is for feeds of just these names, types and shapes. Both are sorted by name.
  static bool fits(const Program& program, const Prepared& p, const Feeds& given) {
    if (given.size() != program.inputs.size() || p.generation == 0) return false;
    std::size_t i = 0;
    for (const auto& [name, tensor] : given) {
      const Slot& slot = *p.feeds[i];
      if (slot.type.dtype != tensor.dtype() || slot.type.shape != tensor.shape() ||
          program.inputs[i].first != name)
        return false;
      ++i;
    }
    return true;
  }

  Prepared& select(Program& program, const Feeds& given) {
    if (program.plans.empty() || !fits(program, program.plans.front(), given))
      prepare(program, bind_feeds(program.graph.name, program.inputs, program.symbols, given));
    Prepared& p = program.plans.front();
    reserve(p.plan);
    if (p.generation != generation) connect(program, p);
    return p;
  }

  HostTensor fetch(const Prepared& p, int index) const {
    const Slot& slot = p.plan.slots[static_cast<std::size_t>(index)];
    HostTensor out(slot.type.dtype, slot.type.shape);
    if (slot.bytes > 0) device.download(out.mutable_raw(), address(p, slot), slot.bytes);
    return out;
  }
};

Session::Session(Device& device, Communicator& communicator)
    : impl_(std::make_unique<Impl>(device, communicator)) {}
Session::~Session() = default;

void Session::add_program(const std::string& name, const Graph& graph) { impl_->add_program(name, graph); }

const Graph& Session::program(const std::string& name) const { return impl_->program(name).graph; }

void Session::set_state(const std::string& name, const HostTensor& value) {
  const Impl::State& s = impl_->find_state(name);
  if (s.type != value.type())
    throw Error(cat("'", name, "' is ", s.type, ", but ", value.type(), " is given"));
  if (s.bytes > 0) impl_->device.upload(impl_->state.data() + s.offset, value.raw(), s.bytes);
}

HostTensor Session::get_state(const std::string& name) const {
  const Impl::State& s = impl_->find_state(name);
  HostTensor out(s.type.dtype, static_shape(s.type.shape));
  if (s.bytes > 0) impl_->device.download(out.mutable_raw(), impl_->state.data() + s.offset, s.bytes);
  return out;
}

void Session::set_scalar(const std::string& name, double value) {
  const auto it = impl_->states.find(name);
  if (it == impl_->states.end()) return;
  const TensorType& type = it->second.type;
  set_state(name, HostTensor::full(type.dtype,
                                   numel(type.shape) == Dim(1) ? static_shape(type.shape) : Ints{}, value));
}

std::vector<std::string> Session::state_names() const {
  std::vector<std::string> out;
  for (const auto& [name, state] : impl_->states) out.push_back(name);
  return out;
}

bool Session::has_state(const std::string& name) const { return impl_->states.count(name) > 0; }

Feeds Session::run(const std::string& name, const Feeds& feeds, const std::vector<std::string>& fetch) {
  Program& program = impl_->program(name);
  const Prepared& p = impl_->select(program, feeds);
  for (const std::string& output : fetch)
    if (!p.plan.outputs.count(output)) throw Error(cat("'", name, "' has no output '", output, "'"));
  std::size_t i = 0;
  for (const auto& [input, tensor] : feeds) {
    if (tensor.bytes() > 0) impl_->device.upload(p.feed_pointers[i], tensor.raw(), tensor.bytes());
    ++i;
  }
  impl_->lanes.run(p.calls, p.collectives);
  Feeds out;
  if (fetch.empty())
    for (const auto& [output, slot] : p.plan.outputs)
      out.emplace_hint(out.end(), output, impl_->fetch(p, slot));
  for (const std::string& output : fetch)
    out.emplace(output, impl_->fetch(p, p.plan.outputs.find(output)->second));
  return out;
}

const Plan& Session::plan(const std::string& program, const DimBindings& dims) {
  return impl_->prepare(impl_->program(program), dims).plan;
}

std::size_t Session::memory_bytes() const {
  std::size_t out = impl_->state.bytes() + impl_->feeds.bytes() + impl_->grads.bytes() + impl_->arena.bytes();
  for (const auto& [name, program] : impl_->programs)
    for (const Prepared& p : program.plans) out += p.constants.bytes();
  return out;
}

}  // namespace onnxddp

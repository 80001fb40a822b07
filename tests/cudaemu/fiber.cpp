// Runs the blocks of a kernel: every thread is a fiber that starts when its turn comes and parks only at a
// barrier that others have not reached, so a kernel without barriers never switches back and forth.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "tests/cudaemu/core.h"

#if defined(__SANITIZE_ADDRESS__)
#define CUDAEMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDAEMU_ASAN 1
#endif
#endif
#if defined(CUDAEMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
extern "C" void cudaemu_switch(void** from, void* to);
asm(R"(
.text
.type cudaemu_switch, @function
.globl cudaemu_switch
.hidden cudaemu_switch
cudaemu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cudaemu_switch, .-cudaemu_switch
)");
#else
#include <ucontext.h>
#endif

namespace cudaemu {

Index3 thread_index, block_index, block_size, grid_size;
Now now;

namespace {

#if defined(CUDAEMU_ASAN)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr size_t kGuardBytes = 4096;
constexpr size_t kStaticSharedLimit = 48 << 10, kRedZone = 64, kArenaBytes = 8 << 20;
constexpr size_t kMaxExchange = 16;

#if defined(__x86_64__)
using Context = void*;
#else
using Context = ucontext_t;
#endif

// Lanes that meet under one mask. Slots alternate, so that a fast lane's next exchange spoils no slow lane's
// read.
struct Rendezvous {
  unsigned mask = 0, generation = 0, arrived = 0;
  uint32_t warp_phase[2] = {0, 0};
  unsigned present[2] = {0, 0};
  unsigned votes[2] = {0, 0};
  char slots[2][kWarpSize][kMaxExchange];

  void reset() {
    generation = arrived = 0;
    for (int i = 0; i < 2; ++i) warp_phase[i] = present[i] = votes[i] = 0;
  }
};

struct Fiber {
  Context context{};
  char* stack = nullptr;
  void* fake_stack = nullptr;
  Index3 index{};
  bool started = false, done = false;
  uint32_t warp_phase = 0;
  const unsigned* waits_for = nullptr;  // a generation counter that must leave `generation`
  unsigned generation = 0;
  const char* file = nullptr;  // of the barrier it waits at
  int line = 0;
};

struct BlockBarrier {
  unsigned generation = 0;
  int arrived = 0, votes = 0;
  int result_votes[2] = {0, 0}, result_threads[2] = {0, 0};
  const char* file = nullptr;
  int line = 0;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<char*> free_stacks;
  Context scheduler{};
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_bottom = nullptr;
  size_t scheduler_size = 0;
  Fiber* current = nullptr;
  int alive = 0;
  std::vector<unsigned> alive_lanes;  // of each warp
  BlockBarrier barrier;
  std::vector<std::vector<std::unique_ptr<Rendezvous>>> meetings;  // of each warp, by mask
  char* shared = nullptr;
  size_t shared_used = 0, static_bytes = 0;
  std::vector<char*> red_zones;
  void* dynamic = nullptr;
  size_t dynamic_bytes = 0, dynamic_element = 0;
  const std::function<void()>* body = nullptr;
  std::string name;
  bool shared_reported = false;
};
Machine& machine() {
  static auto* m = new Machine;
  return *m;
}

int linear(const Fiber* f) { return static_cast<int>(f - machine().fibers.data()); }

// --- switching ---

void before_switch([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom,
                   [[maybe_unused]] size_t size) {
#if defined(CUDAEMU_ASAN)
  __sanitizer_start_switch_fiber(fake, bottom, size);
#endif
}
void after_switch([[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom,
                  [[maybe_unused]] size_t* size) {
#if defined(CUDAEMU_ASAN)
  __sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}
void switch_context(Context& from, Context& to) {
#if defined(__x86_64__)
  cudaemu_switch(&from, to);
#else
  swapcontext(&from, &to);
#endif
}

void to_scheduler(bool for_ever) {
  Machine& m = machine();
  Fiber* self = m.current;
  before_switch(for_ever ? nullptr : &self->fake_stack, m.scheduler_bottom, m.scheduler_size);
  switch_context(self->context, m.scheduler);
  after_switch(self->fake_stack, &m.scheduler_bottom, &m.scheduler_size);
}

void to_fiber(Fiber& f) {
  Machine& m = machine();
  m.current = &f;
  thread_index = f.index;
  now.thread = linear(&f);
  now.phase = m.barrier.generation;
  now.warp_phase = f.warp_phase;
  before_switch(&m.scheduler_fake_stack, f.stack, kStackBytes);
  switch_context(m.scheduler, f.context);
  after_switch(m.scheduler_fake_stack, nullptr, nullptr);
  if (f.done) {
    m.free_stacks.push_back(f.stack);
    f.stack = nullptr;
  }
}

void complete_block_barrier() {
  BlockBarrier& b = machine().barrier;
  b.result_votes[b.generation & 1] = b.votes;
  b.result_threads[b.generation & 1] = b.arrived;
  b.arrived = b.votes = 0;
  b.file = nullptr;
  ++b.generation;
}

void complete_meeting(Rendezvous& r) {
  const unsigned parity = r.generation & 1;
  ++r.warp_phase[parity];
  r.arrived = 0;
  ++r.generation;
  const unsigned next = r.generation & 1;
  r.warp_phase[next] = r.present[next] = r.votes[next] = 0;
}

unsigned popcount(unsigned x) { return static_cast<unsigned>(__builtin_popcount(x)); }

// A thread that ends no longer counts at barriers.
void retire(Fiber* self) {
  Machine& m = machine();
  const auto warp = static_cast<size_t>(linear(self)) / kWarpSize;
  self->done = true;
  --m.alive;
  m.alive_lanes[warp] &= ~(1u << (linear(self) % kWarpSize));
  if (m.barrier.arrived > 0 && m.barrier.arrived >= m.alive) complete_block_barrier();
  for (auto& r : m.meetings[warp])
    if (r->arrived > 0 && r->arrived >= popcount(r->mask & m.alive_lanes[warp])) complete_meeting(*r);
}

void fiber_main() {
  Machine& m = machine();
  after_switch(nullptr, &m.scheduler_bottom, &m.scheduler_size);
  (*m.body)();
  retire(m.current);
  to_scheduler(true);
  std::abort();  // a retired fiber is never resumed
}

char* take_stack() {
  Machine& m = machine();
  if (m.free_stacks.empty()) {
    void* p =
        mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fault(kFaultOther, "no memory for the stack of a kernel thread");
    mprotect(p, kGuardBytes, PROT_NONE);
    m.free_stacks.push_back(static_cast<char*>(p) + kGuardBytes);
  }
  char* stack = m.free_stacks.back();
  m.free_stacks.pop_back();
#if defined(CUDAEMU_ASAN)
  __asan_unpoison_memory_region(stack, kStackBytes);
#endif
  return stack;
}

void start(Fiber& f) {
  f.stack = take_stack();
  f.started = true;
#if defined(__x86_64__)
  auto** sp = reinterpret_cast<void**>(f.stack + kStackBytes - 64);
  *--sp = nullptr;  // where a return address of fiber_main would be: keeps the stack aligned as a call does
  *--sp = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  f.context = sp;
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = kStackBytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, fiber_main, 0);
#endif
  to_fiber(f);
}

// --- waiting ---

void park(const unsigned* counter, unsigned generation) {
  Machine& m = machine();
  Fiber* self = m.current;
  self->waits_for = counter;
  self->generation = generation;
  to_scheduler(false);
  self->waits_for = nullptr;
}

Rendezvous& meeting_of(int warp, unsigned mask) {
  auto& list = machine().meetings[static_cast<size_t>(warp)];
  for (auto& r : list)
    if (r->mask == mask) return *r;
  list.push_back(std::make_unique<Rendezvous>());
  list.back()->mask = mask;
  return *list.back();
}

// Arrives with a value and a vote; returns the meeting and the parity to read from.
std::pair<Rendezvous*, unsigned> meet(unsigned mask, const void* in, size_t bytes, bool vote) {
  Machine& m = machine();
  Fiber* self = m.current;
  const int thread = linear(self), warp = thread / kWarpSize, lane = thread % kWarpSize;
  if ((mask >> lane & 1u) == 0) report(m.name + ": a warp function is called by a lane outside of its mask");
  Rendezvous& r = meeting_of(warp, mask);
  const unsigned parity = r.generation & 1, generation = r.generation;
  if (bytes > 0) std::memcpy(r.slots[parity][lane], in, bytes);
  r.present[parity] |= 1u << lane;
  if (vote) r.votes[parity] |= 1u << lane;
  r.warp_phase[parity] = std::max(r.warp_phase[parity], self->warp_phase);
  if (++r.arrived >= popcount(mask & m.alive_lanes[static_cast<size_t>(warp)]))
    complete_meeting(r);
  else
    park(&r.generation, generation);
  self->warp_phase = now.warp_phase = std::max(self->warp_phase + 1, r.warp_phase[parity]);
  return {&r, parity};
}

std::string place(const Fiber& f) {
  return f.waits_for == nullptr || f.file == nullptr ? "a warp function"
                                                     : std::string(f.file) + ":" + std::to_string(f.line);
}

[[noreturn]] void report_divergence() {
  std::map<std::string, int> waiting;
  for (const Fiber& f : machine().fibers)
    if (!f.done) ++waiting[place(f)];
  std::string text = machine().name + ": barrier divergence, nobody can go on:";
  for (const auto& [where, count] : waiting)
    text += " " + std::to_string(count) + " threads wait at " + where + ";";
  fault(kFaultBarrier, text);
}

// --- blocks ---

void begin_block(int threads) {
  Machine& m = machine();
  ++now.block;
  m.alive = threads;
  m.barrier = BlockBarrier{};
  const size_t warps = static_cast<size_t>(threads + kWarpSize - 1) / kWarpSize;
  if (m.meetings.size() < warps) m.meetings.resize(warps);
  for (auto& list : m.meetings)
    for (auto& r : list) r->reset();
  m.alive_lanes.assign(warps, 0);
  m.shared_used = m.static_bytes = 0;
  m.red_zones.clear();
  m.dynamic = nullptr;
  m.fibers.assign(static_cast<size_t>(threads), Fiber{});
  for (int i = 0; i < threads; ++i) {
    const auto u = static_cast<unsigned>(i);
    m.fibers[static_cast<size_t>(i)].index = {u % block_size.x, u / block_size.x % block_size.y,
                                              u / (block_size.x * block_size.y)};
    m.alive_lanes[static_cast<size_t>(i) / kWarpSize] |= 1u << (i % kWarpSize);
  }
}

void end_block() {
  for (const char* zone : machine().red_zones)
    for (size_t i = 0; i < kRedZone; ++i)
      if (static_cast<unsigned char>(zone[i]) != 0xA5) {
        report(machine().name + ": out of bounds in static shared memory");
        return;
      }
}

// 0..n-1 forwards, backwards, or from a random start in a random direction.
struct Order {
  explicit Order(unsigned count) : n(count) {
    const Schedule s = config().schedule;
    backwards = s == Schedule::kLazy || (s == Schedule::kRandom && rng()() % 2 == 0);
    first = s == Schedule::kRandom ? static_cast<unsigned>(rng()() % n) : 0;
  }
  unsigned operator[](unsigned i) const {
    const unsigned k = i + first < n ? i + first : i + first - n;
    return backwards ? n - 1 - k : k;
  }
  unsigned n, first;
  bool backwards;
};

void run_block(int threads) {
  Machine& m = machine();
  begin_block(threads);
  const Order order(static_cast<unsigned>(threads));
  for (unsigned i = 0; i < order.n; ++i) start(m.fibers[order[i]]);
  while (m.alive > 0) {
    bool moved = false;
    for (unsigned i = 0; i < order.n; ++i) {
      Fiber& f = m.fibers[order[i]];
      if (f.done || (f.waits_for != nullptr && *f.waits_for == f.generation)) continue;
      to_fiber(f);
      moved = true;
    }
    if (!moved) report_divergence();
  }
  end_block();
}

}  // namespace

void run_grid(const std::string& name, dim3 grid, dim3 block, size_t shared_bytes,
              const std::function<void()>& body) {
  Machine& m = machine();
  m.name = name;
  m.body = &body;
  m.dynamic_bytes = shared_bytes;
  m.shared_reported = false;
  block_size = {block.x, block.y, block.z};
  grid_size = {grid.x, grid.y, grid.z};
  const Order order(grid.x);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned i = 0; i < grid.x; ++i) {
        block_index = {order[i], y, z};
        run_block(static_cast<int>(block.x * block.y * block.z));
      }
}

int lane_of_thread() { return now.thread % kWarpSize; }

int block_barrier(Vote vote, bool predicate, const char* file, int line) {
  Machine& m = machine();
  BlockBarrier& b = m.barrier;
  if (b.arrived == 0) {
    b.file = file;
    b.line = line;
  } else if (b.line != line) {
    report(m.name + ": barrier in divergent code, threads meet from " + b.file + ":" +
           std::to_string(b.line) + " and " + file + ":" + std::to_string(line));
  }
  const unsigned generation = b.generation;
  b.votes += predicate ? 1 : 0;
  if (++b.arrived >= m.alive) {
    complete_block_barrier();
  } else {
    m.current->file = file;
    m.current->line = line;
    park(&b.generation, generation);
    m.current->file = nullptr;
  }
  now.phase = b.generation;
  const int votes = b.result_votes[generation & 1], threads = b.result_threads[generation & 1];
  if (vote == Vote::kCount) return votes;
  return vote == Vote::kAnd ? votes == threads : votes > 0;
}

void warp_exchange(unsigned mask, const void* in, void* out, size_t bytes, int source) {
  if (bytes > kMaxExchange) not_emulated("shuffles of more than 16 bytes");
  const auto [r, parity] = meet(mask, in, bytes, false);
  const bool present = source >= 0 && source < kWarpSize && (r->present[parity] >> source & 1u) != 0;
  if (present)
    std::memcpy(out, r->slots[parity][source], bytes);
  else
    poison(out, bytes);
}

unsigned warp_ballot(unsigned mask, bool predicate) {
  const auto [r, parity] = meet(mask, nullptr, 0, predicate);
  return r->votes[parity];
}

void shared_report(const char* what, int other_thread) {
  Machine& m = machine();
  if (m.shared_reported) return;
  m.shared_reported = true;
  std::string text = m.name + ": a thread " + what;
  if (other_thread >= 0)
    text +=
        " (threads " + std::to_string(now.thread) + " and " + std::to_string(other_thread) + " of the block)";
  report(text);
}

void* allocate_shared(size_t bytes, size_t declared) {
  Machine& m = machine();
  if (m.shared == nullptr) {
    m.shared = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  const size_t at = (m.shared_used + 15) / 16 * 16;
  m.static_bytes += declared;
  if (m.static_bytes > kStaticSharedLimit)
    fault(kFaultOther, m.name + ": more than 48 KiB of static shared memory");
  if (at + bytes + kRedZone > kArenaBytes) not_emulated("this much shared memory");
  m.shared_used = at + bytes + kRedZone;
  std::memset(m.shared + at + bytes, 0xA5, kRedZone);
  m.red_zones.push_back(m.shared + at + bytes);
  return m.shared + at;
}

void* dynamic_shared_memory(size_t bytes, size_t element, size_t* count) {
  Machine& m = machine();
  *count = m.dynamic_bytes / bytes;
  if (m.dynamic == nullptr) {
    m.dynamic = allocate_shared(*count * element, 0);
    m.dynamic_element = element;
  } else if (m.dynamic_element != element) {
    not_emulated("dynamic shared memory of several types in one kernel");
  }
  return m.dynamic;
}

void check_alignment(const void* p, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(p) % alignment == 0) return;
  fault(kFaultKernel, machine().name + ": misaligned access of " + std::to_string(alignment) + " bytes");
}

}  // namespace cudaemu

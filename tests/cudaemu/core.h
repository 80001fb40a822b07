// Private types of the emulator: operations, streams, events, captured graphs, memory. One lock guards
// everything; there are no threads of its own: whoever waits runs the scheduler.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/cudaemu/control.h"
#include "tests/cudaemu/device.h"

namespace cudaemu {

// --- report.cpp ---

struct Config {
  uint64_t seed = 1;
  Schedule schedule = Schedule::kRandom;
  double deadlock_s = 30;
  bool pkeys = true;
  int devices = 8;
  size_t memory = size_t{8} << 30;
};
Config& config();
std::mt19937_64& rng();

/// "rank 1 of 4", set by the first communicator; begins every message.
void set_identity(const std::string& text);
/// Remembers and prints a finding (each text once).
void report(const std::string& text);
/// Prints the finding and ends the process.
[[noreturn]] void fault(int code, const std::string& text);
/// "not emulated: NAME", abort.
[[noreturn]] void not_emulated(const std::string& name);

/// Holds the emulator's lock. Recursive.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};
/// Lets other threads in for a moment.
void sleep_unlocked(int microseconds);

/// Remembers an error for cudaGetLastError and passes it on.
cudaError_t fail(cudaError_t error);

// --- memory.cpp ---

/// Non-negative byte offsets [first, second) that have been written.
class IntervalSet {
 public:
  void add(size_t from, size_t to);
  bool covers(size_t from, size_t to) const;

 private:
  std::map<size_t, size_t> spans_;
};

struct Block {
  size_t bytes = 0;     ///< as asked for
  char* map = nullptr;  ///< first page
  size_t map_bytes = 0;
  int number = 0;
  bool freed = false;
  IntervalSet written;
};
/// The block (alive or freed) that p points into or just behind, else null; *base gets its first byte.
Block* find_block(const void* p, char** base);
bool is_device(const void* p);
/// "buffer 3 (4096 bytes) + 16".
std::string describe_address(const void* p);

/// The blocks touched are reachable inside its life, where there are protection keys for this thread only. At
/// its end their red zones are checked.
class DeviceOpen {
 public:
  DeviceOpen(const std::vector<Access>& touched, const std::string& operation);
  ~DeviceOpen();
  DeviceOpen(const DeviceOpen&) = delete;
  DeviceOpen& operator=(const DeviceOpen&) = delete;

 private:
  std::vector<Block*> opened_;
};

struct Pinned {
  char* base = nullptr;
  size_t bytes = 0, map_bytes = 0;
  unsigned flags = 0;
  bool registered = false;  ///< cudaHostRegister: the pages belong to the program
  int readers = 0, writers = 0;
};
/// The pinned buffer of p, or null.
Pinned* find_pinned(const void* p);
/// True if kernels may use the host address p (cudaHostAllocMapped).
bool is_mapped(const void* p);
/// Sets the page rights that the copies in flight allow.
void protect_pinned(const Pinned& pinned, bool open);
void open_all_pinned(bool open);

inline constexpr uint16_t kPoison =
    0xFFFB;  // a NaN in bf16 and float16; doubled in float32, four times in float64
void poison(void* p, size_t bytes);
/// Offset of the first poisoned 32-bit word, or npos.
size_t find_poison(const void* p, size_t bytes);

// --- stream.cpp ---

using Clock = std::map<int, uint64_t>;  ///< vector clock: stream id -> operations
void join(Clock& into, const Clock& other);

struct EventState {
  uint64_t recorded = 0, completed = 0;
  Clock clock;
  double time_s = 0;
  bool timing = true;
  CUgraph_st* capture = nullptr;  ///< the last record was captured into this graph, behind these nodes
  uint64_t capture_id = 0;
  std::set<int> capture_nodes;
};

struct PinUse {
  const void* base;  ///< of the pinned buffer
  bool write;
};

/// A state machine in the place of an operation: poll advances it, true when complete; state says what it
/// waits for.
struct Started {
  std::function<bool()> poll;
  std::function<std::string()> state;
};

struct Op {
  enum Kind { kWork, kRecord, kWait, kHost };
  std::string name;
  Kind kind = kWork;
  std::vector<Access> touched;
  std::vector<PinUse> pins;
  std::function<void()> run;                   ///< the work; device memory is open in it, but not for kHost
  std::function<Started(CUstream_st*)> start;  ///< instead of run: called each time the operation is queued
  Started machine;                             ///< what start made
  std::function<void(int)> graph_reference;    ///< told +1/-1 when an executable graph takes or drops it
  std::shared_ptr<EventState> event;
  uint64_t version = 0;
};

/// Queues op on a stream, or adds it to the graph that the stream is captured into.
cudaError_t enqueue(cudaStream_t stream, Op op);
/// Queues op on a stream that is not captured.
void enqueue_now(CUstream_st* stream, Op op);
/// The error of using this stream handle now, if any.
cudaError_t check_stream(cudaStream_t stream, const char* what);
/// Runs operations until done() holds, those that `target` needs first if the schedule is lazy. `waiting`
/// tells a deadlock report what else is waited for.
void run_until(const std::function<bool()>& done, CUstream_st* target,
               const std::function<std::string()>& waiting = nullptr);
/// Everything that the clock covers is known to the host now.
void host_knows(const Clock& clock);
/// Waits for all streams.
void synchronize_all();
/// Runs one operation of any stream.
bool run_any();
/// A stream of the emulator's own.
CUstream_st* make_stream(bool hidden);
void destroy_stream(CUstream_st* stream);
CUstream_st* default_stream();
/// Work got done by other means than an operation's end (collectives).
void note_progress();
/// Other ranks' progress keeps a wait alive: true if there was any since the last call. Set by nccl.cpp.
extern bool (*peers_progress)();
/// Tells the other ranks of progress here. Set by nccl.cpp.
extern void (*tell_peers)();
/// Host functions may not call CUDA.
extern bool in_host_function;

// --- checker.cpp ---

/// True if the clock knows of the stream's operation `time`.
bool covers(const Clock& clock, int stream, uint64_t time);
/// Reports what is wrong with the memory that op touches: freed, out of bounds, never written, or not ordered
/// with another stream's access. Call when op is queued on s.
void check_op(CUstream_st* s, const Op& op);
/// Drops the accesses that the host has waited for: everything queued later is ordered behind them.
void forget_touches(const Clock& host);

// --- graph.cpp ---

/// Adds a node behind the stream's captured tail.
cudaError_t capture_op(CUstream_st* stream, Op op);
cudaError_t capture_record(CUstream_st* stream, EventState& event);
cudaError_t capture_wait(CUstream_st* stream, EventState& event);
/// The error of an unsafe call (one that may synchronise) while a capture forbids it; the capture becomes
/// invalid.
cudaError_t unsafe_call();
bool capture_alive(const EventState& event);

// --- fiber.cpp ---

/// Runs all blocks of a kernel, one after another, threads as fibers.
void run_grid(const std::string& name, dim3 grid, dim3 block, size_t shared_bytes,
              const std::function<void()>& body);

}  // namespace cudaemu

struct CUevent_st {
  std::shared_ptr<cudaemu::EventState> state;
};

struct CUstream_st {
  int id = 0;
  bool hidden = false;
  int priority = 0;
  std::deque<cudaemu::Op> queue;
  cudaemu::Clock clock;
  uint64_t enqueued = 0, done = 0;
  CUgraph_st* capture = nullptr;
  std::set<int> tail;  ///< captured nodes that the next one depends on
};

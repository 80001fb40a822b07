// Streams, events and the scheduler.
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "tests/cudaemu/core.h"

namespace cudaemu {

bool (*peers_progress)() = nullptr;
void (*tell_peers)() = nullptr;
bool in_host_function = false;

namespace {

struct State {
  std::vector<CUstream_st*> streams;
  std::vector<std::pair<PinUse, std::pair<int, uint64_t>>> pins_in_flight;
  Clock host;
  int next_id = 1;
  std::vector<std::pair<int, uint64_t>> retired;  // streams that are gone: id, operations
  uint64_t progress = 0;
  CUstream_st* default_stream = nullptr;
};
State& state() {
  static auto* s = new State;
  return *s;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void lock_pins(CUstream_st* s, const Op& op) {
  for (const PinUse& use : op.pins) {
    Pinned* pin = find_pinned(use.base);
    if (pin == nullptr) {
      report(op.name + ": use after free of a pinned buffer");
      continue;
    }
    ++(use.write ? pin->writers : pin->readers);
    protect_pinned(*pin, false);
    state().pins_in_flight.push_back({use, {s->id, s->clock[s->id]}});
  }
}

bool may_run(Op& op) {
  if (op.kind == Op::kWait) return op.event->completed >= op.version;
  return !op.machine.poll || op.machine.poll();
}

void run_host_function(const Op& op) {
  open_all_pinned(true);
  in_host_function = true;
  op.run();
  in_host_function = false;
  open_all_pinned(false);
}

void open_pins(const Op& op, bool open) {
  for (const PinUse& use : op.pins)
    if (const Pinned* pin = find_pinned(use.base)) protect_pinned(*pin, open);
}

void run_work(const Op& op) {
  open_pins(op, true);
  {
    DeviceOpen open(op.touched, op.name);
    op.run();
  }
  open_pins(op, false);
}

bool step(CUstream_st* s) {
  if (s->queue.empty() || !may_run(s->queue.front())) return false;
  const Op op = std::move(s->queue.front());
  s->queue.pop_front();
  if (op.kind == Op::kHost)
    run_host_function(op);
  else if (op.run)
    run_work(op);
  if (op.kind == Op::kRecord) {
    op.event->completed = std::max(op.event->completed, op.version);
    op.event->time_s = now_seconds();
  }
  ++s->done;
  note_progress();
  return true;
}

// Runs what `s` needs next: its first operation, or what records the event that it waits for.
bool step_towards(CUstream_st* s, int depth = 0) {
  if (s == nullptr || s->queue.empty() || depth > 64) return false;
  if (step(s)) return true;
  const Op& front = s->queue.front();
  if (front.kind != Op::kWait) return false;
  const auto event = front.event;
  for (CUstream_st* other : state().streams) {
    const bool records = std::any_of(other->queue.begin(), other->queue.end(), [&](const Op& op) {
      return op.kind == Op::kRecord && op.event == event;
    });
    if (other != s && records && step_towards(other, depth + 1)) return true;
  }
  return false;
}

[[noreturn]] void report_deadlock(const std::string& waiting) {
  std::string text = "deadlock:";
  if (!waiting.empty()) text += " " + waiting + ";";
  for (const CUstream_st* s : state().streams) {
    if (s->queue.empty()) continue;
    const Op& op = s->queue.front();
    text += " stream " + std::to_string(s->id) + " is stuck at " + op.name;
    if (op.machine.state) text += " (" + op.machine.state() + ")";
    text += ";";
  }
  fault(kFaultDeadlock, text + " nothing has moved for " + std::to_string(config().deadlock_s) + " s");
}

cudaError_t make_public_stream(cudaStream_t* out, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking) not_emulated("streams that synchronise with the default stream");
  config();
  *out = make_stream(false);
  (*out)->priority = priority;
  return cudaSuccess;
}

cudaError_t check_event(cudaEvent_t event) {
  return event == nullptr || !event->state ? fail(cudaErrorInvalidResourceHandle) : cudaSuccess;
}

}  // namespace

void join(Clock& into, const Clock& other) {
  for (const auto& [id, time] : other) {
    uint64_t& mine = into[id];
    mine = std::max(mine, time);
  }
}

void host_knows(const Clock& clock) {
  State& s = state();
  join(s.host, clock);
  forget_touches(s.host);
  auto& pins = s.pins_in_flight;
  for (size_t i = 0; i < pins.size();) {
    if (!covers(s.host, pins[i].second.first, pins[i].second.second)) {
      ++i;
      continue;
    }
    const PinUse use = pins[i].first;
    if (Pinned* pin = find_pinned(use.base)) {
      --(use.write ? pin->writers : pin->readers);
      protect_pinned(*pin, false);
    }
    pins[i] = pins.back();
    pins.pop_back();
  }
}

void note_progress() {
  ++state().progress;
  if (tell_peers != nullptr) tell_peers();
}

/// The id of a stream that is gone, if the host knows of all that it did: whatever is queued later comes
/// behind that. Clocks would grow with every stream otherwise.
static int take_id(Clock& clock) {
  State& s = state();
  for (auto it = s.retired.begin(); it != s.retired.end(); ++it) {
    const auto [id, time] = *it;
    if (time > 0 && !covers(s.host, id, time)) continue;
    if (time > 0) clock[id] = time;
    s.retired.erase(it);
    return id;
  }
  return s.next_id++;
}

CUstream_st* make_stream(bool hidden) {
  auto* s = new CUstream_st;
  s->id = take_id(s->clock);
  s->hidden = hidden;
  state().streams.push_back(s);
  return s;
}

void destroy_stream(CUstream_st* stream) {
  auto& all = state().streams;
  all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  state().retired.emplace_back(stream->id, stream->clock[stream->id]);
  delete stream;
}

CUstream_st* default_stream() {
  if (state().default_stream == nullptr) state().default_stream = make_stream(true);
  return state().default_stream;
}

cudaError_t check_stream(cudaStream_t stream, const char* what) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    not_emulated(std::string("the default stream (") + what + ")");
  if (in_host_function) {
    report(std::string(what) + " inside a host function");
    return fail(cudaErrorNotPermitted);
  }
  const auto& all = state().streams;
  if (std::find(all.begin(), all.end(), stream) == all.end()) {
    report(std::string(what) + " on a destroyed stream");
    return fail(cudaErrorInvalidResourceHandle);
  }
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, Op op) {
  if (cudaError_t e = check_stream(stream, op.name.c_str())) return e;
  if (stream->capture != nullptr) return capture_op(stream, std::move(op));
  enqueue_now(stream, std::move(op));
  return cudaSuccess;
}

void enqueue_now(CUstream_st* s, Op op) {
  join(s->clock, state().host);
  ++s->clock[s->id];
  if (op.kind == Op::kWait) join(s->clock, op.event->clock);
  check_op(s, op);
  if (op.kind == Op::kRecord) op.event->clock = s->clock;
  if (op.start) op.machine = op.start(s);
  lock_pins(s, op);
  ++s->enqueued;
  s->queue.push_back(std::move(op));
  if (config().schedule == Schedule::kEager) {
    while (run_any()) {
    }
  } else if (config().schedule == Schedule::kRandom) {
    for (auto n = rng()() % 3; n > 0; --n) run_any();
  }
}

bool run_any() {
  std::vector<CUstream_st*> ready;
  for (CUstream_st* s : state().streams)
    if (!s->queue.empty()) ready.push_back(s);
  std::shuffle(ready.begin(), ready.end(), rng());
  return std::any_of(ready.begin(), ready.end(), step);
}

void run_until(const std::function<bool()>& done, CUstream_st* target,
               const std::function<std::string()>& waiting) {
  double since = now_seconds();
  uint64_t seen = state().progress;
  int idle = 0;
  while (!done()) {
    const bool lazy = config().schedule == Schedule::kLazy;
    if ((lazy && step_towards(target)) || run_any() || state().progress != seen) {
      seen = state().progress;
      since = now_seconds();
      idle = 0;
      continue;
    }
    if (peers_progress != nullptr && peers_progress()) since = now_seconds();
    if (now_seconds() - since > config().deadlock_s) report_deadlock(waiting ? waiting() : "");
    sleep_unlocked(++idle < 50 ? 20 : 500);
  }
}

void synchronize_all() {
  run_until(
      [] {
        const auto& all = state().streams;
        return std::all_of(all.begin(), all.end(), [](const CUstream_st* s) { return s->queue.empty(); });
      },
      nullptr);
  for (const CUstream_st* s : std::vector<CUstream_st*>(state().streams)) host_knows(s->clock);
  for (const auto& [id, time] : state().retired) host_knows({{id, time}});
}

}  // namespace cudaemu

using namespace cudaemu;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  Lock lock;
  return make_public_stream(out, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock;
  return make_public_stream(out, flags, priority);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock;
  if (cudaError_t e = check_stream(stream, "cudaStreamSynchronize")) return e;
  if (stream->capture != nullptr) return fail(unsafe_call());
  const uint64_t target = stream->enqueued;
  run_until([&] { return stream->done >= target; }, stream);
  host_knows(stream->clock);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock;
  if (cudaError_t e = check_stream(stream, "cudaStreamQuery")) return e;
  if (stream->capture != nullptr) return fail(unsafe_call());
  run_any();
  if (!stream->queue.empty()) return cudaErrorNotReady;
  host_knows(stream->clock);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock;
  if (cudaError_t e = check_stream(stream, "cudaStreamDestroy")) return e;
  if (stream->capture != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
  run_until([&] { return stream->queue.empty(); }, stream);
  destroy_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Lock lock;
  if (cudaError_t e = unsafe_call()) return fail(e);
  synchronize_all();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  Lock lock;
  if ((flags & cudaEventInterprocess) != 0) not_emulated("interprocess events");
  *out = new CUevent_st{std::make_shared<EventState>()};
  (*out)->state->timing = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock;
  if (cudaError_t e = check_event(event)) return e;
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock;
  if (cudaError_t e = check_event(event)) return e;
  if (cudaError_t e = check_stream(stream, "cudaEventRecord")) return e;
  if (stream->capture != nullptr) return capture_record(stream, *event->state);
  Op op;
  op.name = "event record";
  op.kind = Op::kRecord;
  op.event = event->state;
  op.version = ++event->state->recorded;
  event->state->capture = nullptr;
  enqueue_now(stream, std::move(op));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Lock lock;
  if (cudaError_t e = check_event(event)) return e;
  if (cudaError_t e = check_stream(stream, "cudaStreamWaitEvent")) return e;
  if (flags != 0) not_emulated("external event waits");
  if (stream->capture != nullptr || capture_alive(*event->state)) return capture_wait(stream, *event->state);
  if (event->state->recorded == 0)
    return cudaSuccess;  // documented: waiting for an unrecorded event does nothing
  Op op;
  op.name = "event wait";
  op.kind = Op::kWait;
  op.event = event->state;
  op.version = event->state->recorded;
  enqueue_now(stream, std::move(op));
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock;
  if (cudaError_t e = check_event(event)) return e;
  if (capture_alive(*event->state)) return fail(cudaErrorCapturedEvent);
  const auto ev = event->state;
  const uint64_t target = ev->recorded;
  CUstream_st* recorder = nullptr;
  for (CUstream_st* s : state().streams)
    for (const Op& op : s->queue)
      if (op.kind == Op::kRecord && op.event == ev) recorder = s;
  const Clock clock = ev->clock;
  run_until([&] { return ev->completed >= target; }, recorder);
  host_knows(clock);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock;
  if (cudaError_t e = check_event(event)) return e;
  if (capture_alive(*event->state)) return fail(cudaErrorCapturedEvent);
  run_any();
  if (event->state->completed < event->state->recorded) return cudaErrorNotReady;
  host_knows(event->state->clock);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Lock lock;
  if (cudaError_t e = check_event(start)) return e;
  if (cudaError_t e = check_event(end)) return e;
  for (const auto& ev : {start->state, end->state}) {
    if (!ev->timing || ev->recorded == 0) return fail(cudaErrorInvalidResourceHandle);
    if (ev->completed < ev->recorded) return cudaErrorNotReady;
  }
  *ms = static_cast<float>((end->state->time_s - start->state->time_s) * 1e3);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  Lock lock;
  Op op;
  op.name = "host function";
  op.kind = Op::kHost;
  op.run = [function, data] { function(data); };
  return enqueue(stream, std::move(op));
}

}  // extern "C"

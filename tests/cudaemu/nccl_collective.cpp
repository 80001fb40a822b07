// Collectives as state machines that the scheduler polls, so that other streams go on meanwhile. Reductions
// run in rank order on every rank: all get the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "tests/cudaemu/nccl_comm.h"

namespace cudaemu {
namespace {

struct Pending {
  std::shared_ptr<Comm> comm;
  cudaStream_t stream;
  Op op;
};
thread_local std::vector<Pending> group;
thread_local int group_depth = 0;

template <class T, class Acc>
Acc widen(T v) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(v);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(v);
  else
    return static_cast<Acc>(v);
}
template <class T, class Acc>
T narrow(Acc v) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half(v);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(v);
  else
    return static_cast<T>(v);
}

template <class Acc>
Acc combine(int op, Acc a, Acc b) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return a != a || a > b ? a : b;
    case ncclMin: return a != a || a < b ? a : b;
    default: return a + b;
  }
}

// out[i] = over all ranks, of element `first + i` of their slots.
template <class T, class Acc>
void reduce_as(const Comm& c, size_t first, size_t count, int op, void* out) {
  std::vector<const T*> in;
  std::vector<Acc> factor;
  for (int r = 0; r < c.size; ++r) {
    in.push_back(reinterpret_cast<const T*>(c.slot(r, c.sequence)) + first);
    factor.push_back(static_cast<Acc>(c.state(r).descriptors[c.sequence % 2].scalar));
  }
  auto* to = static_cast<T*>(out);
  const bool premultiply = op >= ncclNumOps;
  for (size_t i = 0; i < count; ++i) {
    Acc sum{};
    for (size_t r = 0; r < in.size(); ++r) {
      Acc v = widen<T, Acc>(in[r][i]);
      if (premultiply) v = v * factor[r];
      sum = r == 0 ? v : combine(op, sum, v);
    }
    if (op == ncclAvg) sum = sum / static_cast<Acc>(c.size);
    to[i] = narrow<T, Acc>(sum);
  }
}

void reduce(const Comm& c, ncclDataType_t type, size_t first, size_t count, int op, void* out) {
  switch (type) {
    case ncclInt8: return reduce_as<int8_t, int64_t>(c, first, count, op, out);
    case ncclUint8: return reduce_as<uint8_t, uint64_t>(c, first, count, op, out);
    case ncclInt32: return reduce_as<int32_t, int64_t>(c, first, count, op, out);
    case ncclUint32: return reduce_as<uint32_t, uint64_t>(c, first, count, op, out);
    case ncclInt64: return reduce_as<int64_t, int64_t>(c, first, count, op, out);
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(c, first, count, op, out);
    case ncclFloat16: return reduce_as<__half, float>(c, first, count, op, out);
    case ncclFloat32: return reduce_as<float, float>(c, first, count, op, out);
    case ncclFloat64: return reduce_as<double, double>(c, first, count, op, out);
    case ncclBfloat16: return reduce_as<__nv_bfloat16, float>(c, first, count, op, out);
    default: not_emulated(std::string("NCCL data type ") + std::to_string(type));
  }
}

class Machine {
 public:
  Machine(std::shared_ptr<Comm> comm, CollectiveCall call, std::vector<Access> touched, int stream,
          bool captured)
      : comm_(std::move(comm)), call_(call), touched_(std::move(touched)), name_(name_of(call.kind)) {
    number_ = ++comm_->issued;
    described_ = {number_,   call.count,       call.kind, call.type, call.op,
                  call.root, captured ? 1 : 0, stream,    1.0};
    if (call.op >= ncclNumOps) described_.scalar = factor().value;
    const size_t parts = call.kind == Collective::kReduceScatter ? static_cast<size_t>(comm_->size) : 1;
    chunk_elements_ = std::max<size_t>(1, kSlotBytes / bytes_of(call.type) / parts);
  }

  /// True when the collective is over, well or not.
  bool poll() {
    Comm& c = *comm_;
    if (c.aborted || c.error == ncclInvalidUsage) return finish();  // given up, or behind a mismatch
    if (c.finished + 1 != number_ || !c.complete()) return wait();  // one after another, as issued
    while (done_ < call_.count) {
      if (!c.chunk_posted && !post()) return wait();
      if (!all_posted()) return c.broken() ? fail_remote() : wait();
      if (!agree()) return finish();
      take();
    }
    return finish();
  }

  std::string state() const {
    const Comm& c = *comm_;
    std::string text = "collective " + std::to_string(number_) + ", " + described_.text();
    if (!c.error_text.empty()) return text + "; " + c.error_text;
    if (c.finished + 1 != number_) return text + "; waits for collective " + std::to_string(c.finished + 1);
    text += "; waits for rank";
    for (int r = 0; r < c.size; ++r)
      if (c.state(r).posted.load() < c.sequence)
        text += " " + std::to_string(r) + (c.state(r).left.load() != 0 ? " (has left)" : "");
    return text;
  }

 private:
  const Comm::Factor& factor() const { return comm_->factors[static_cast<size_t>(call_.op - ncclNumOps)]; }

  bool wait() {
    comm_->check_peers();
    return false;
  }

  bool fail_remote() {
    comm_->set_error(ncclRemoteError, "another rank found a mismatch");
    return finish();
  }

  bool finish() {
    if (done_ < call_.count) {
      comm_->chunk_posted = false;
      const DeviceOpen open(touched_, name_);
      poison(call_.out, call_.count * bytes_of(call_.type));
    }
    comm_->finished = std::max(comm_->finished, number_);
    note_progress();
    return true;
  }

  size_t chunk() const { return std::min(chunk_elements_, call_.count - done_); }

  bool post() {
    Comm& c = *comm_;
    for (int r = 0; r < c.size; ++r)
      if (c.sequence > 2 && c.state(r).consumed.load() < c.sequence - 2) return false;
    const size_t size = bytes_of(call_.type), bytes = chunk() * size;
    char* slot = c.slot(c.rank, c.sequence);
    const auto* in = static_cast<const char*>(call_.in);
    {
      const DeviceOpen open(touched_, name_);
      if (call_.op >= ncclNumOps && factor().device != nullptr) read_factor();
      if (call_.kind == Collective::kReduceScatter) {
        for (size_t r = 0; r < static_cast<size_t>(c.size); ++r)
          std::memcpy(slot + r * bytes, in + (r * call_.count + done_) * size, bytes);
      } else if (call_.kind != Collective::kBroadcast || call_.root == c.rank) {
        std::memcpy(slot, in + done_ * size, bytes);
      }
    }
    c.mine().descriptors[c.sequence % 2] = described_;
    c.mine().posted.store(c.sequence);
    c.chunk_posted = true;
    note_progress();
    return true;
  }

  void read_factor() {
    const Comm::Factor& f = factor();
    described_.scalar = f.type == ncclFloat64 ? *static_cast<const double*>(f.device)
                        : f.type == ncclBfloat16
                            ? __bfloat162float(*static_cast<const __nv_bfloat16*>(f.device))
                        : f.type == ncclFloat16 ? __half2float(*static_cast<const __half*>(f.device))
                                                : *static_cast<const float*>(f.device);
  }

  bool all_posted() const {
    for (int r = 0; r < comm_->size; ++r)
      if (comm_->state(r).posted.load() < comm_->sequence) return false;
    return true;
  }

  bool agree() {
    Comm& c = *comm_;
    const Descriptor& mine = c.mine().descriptors[c.sequence % 2];
    for (int r = 0; r < c.size; ++r) {
      const Descriptor& other = c.state(r).descriptors[c.sequence % 2];
      if (mine.agrees(other)) continue;
      const std::string text = "collective mismatch: rank " + std::to_string(c.rank) +
                               " is at its collective " + std::to_string(mine.number) + ", " + mine.text() +
                               "; rank " + std::to_string(r) + " is at its collective " +
                               std::to_string(other.number) + ", " + other.text();
      report(text);
      c.set_error(ncclInvalidUsage, text);
      c.break_all();
      return false;
    }
    return true;
  }

  void take() {
    Comm& c = *comm_;
    const size_t size = bytes_of(call_.type), n = chunk();
    auto* out = static_cast<char*>(call_.out);
    {
      const DeviceOpen open(touched_, name_);
      switch (call_.kind) {
        case Collective::kAllReduce: reduce(c, call_.type, 0, n, call_.op, out + done_ * size); break;
        case Collective::kReduceScatter:
          reduce(c, call_.type, static_cast<size_t>(c.rank) * n, n, call_.op, out + done_ * size);
          break;
        case Collective::kBroadcast:
          std::memcpy(out + done_ * size, c.slot(call_.root, c.sequence), n * size);
          break;
        case Collective::kAllGather:
          for (size_t r = 0; r < static_cast<size_t>(c.size); ++r)
            std::memcpy(out + (r * call_.count + done_) * size, c.slot(static_cast<int>(r), c.sequence),
                        n * size);
      }
    }
    done_ += n;
    c.mine().consumed.store(c.sequence);
    ++c.sequence;
    c.chunk_posted = false;
    note_progress();
  }

  std::shared_ptr<Comm> comm_;
  CollectiveCall call_;
  std::vector<Access> touched_;
  std::string name_;
  uint64_t number_ = 0;
  Descriptor described_{};
  size_t chunk_elements_ = 0, done_ = 0;
};

std::vector<Access> ranges(const Comm& c, const CollectiveCall& call) {
  const size_t bytes = call.count * bytes_of(call.type), all = bytes * static_cast<size_t>(c.size);
  const size_t in = call.kind == Collective::kReduceScatter ? all : bytes;
  const size_t out = call.kind == Collective::kAllGather ? all : bytes;
  std::vector<Access> touched;
  if (call.kind != Collective::kBroadcast || call.root == c.rank)
    touched.push_back({call.in, in, true, false});
  touched.push_back({call.out, out, false, true});
  if (call.op >= ncclNumOps) {
    const auto& f = c.factors[static_cast<size_t>(call.op - ncclNumOps)];
    if (f.device != nullptr && is_device(f.device))
      touched.push_back({f.device, bytes_of(f.type), true, false});
  }
  return touched;
}

// Send and receive buffers are apart, or in place as documented.
bool placed_well(const Comm& c, const CollectiveCall& call) {
  const size_t bytes = call.count * bytes_of(call.type), all = bytes * static_cast<size_t>(c.size);
  const auto *in = static_cast<const char*>(call.in), *out = static_cast<const char*>(call.out);
  const size_t mine = static_cast<size_t>(c.rank) * bytes;
  switch (call.kind) {
    case Collective::kAllGather: return in == out + mine || in + bytes <= out || out + all <= in;
    case Collective::kReduceScatter: return out == in + mine || in + all <= out || out + bytes <= in;
    case Collective::kBroadcast:
      if (call.root != c.rank) return true;
      [[fallthrough]];
    default: return in == out || in + bytes <= out || out + bytes <= in;
  }
}

ncclResult_t check_call(const Comm& c, const CollectiveCall& call) {
  const bool reads = call.kind != Collective::kBroadcast || call.root == c.rank;
  if (call.out == nullptr || (reads && call.in == nullptr)) return ncclInvalidArgument;
  if (call.root < 0 || call.root >= c.size) return ncclInvalidArgument;
  if (call.op >= ncclNumOps) {
    const auto i = static_cast<size_t>(call.op - ncclNumOps);
    if (i >= c.factors.size() || !c.factors[i].alive) return ncclInvalidArgument;
  }
  if (!is_device(call.out) || (reads && !is_device(call.in))) {
    report(std::string(name_of(call.kind)) + ": host pointer as a buffer");
    return ncclInvalidArgument;
  }
  if (!placed_well(c, call)) {
    report(std::string(name_of(call.kind)) + ": send and receive buffers overlap, and not in place");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

ncclResult_t enqueue_collective(const std::shared_ptr<Comm>& comm, cudaStream_t stream, Op op) {
  if (enqueue(stream, std::move(op)) != cudaSuccess) return ncclUnhandledCudaError;
  if (comm->blocking || config().schedule == Schedule::kEager) return ncclSuccess;
  comm->pretended_polls = static_cast<int>(rng()() % 3);
  return comm->pretended_polls > 0 ? ncclInProgress : ncclSuccess;
}

Op make_op(const std::shared_ptr<Comm>& comm, const CollectiveCall& call, bool captured) {
  Op op;
  op.name = name_of(call.kind);
  op.touched = ranges(*comm, call);
  op.start = [comm, call, touched = op.touched, captured](CUstream_st* stream) {
    auto machine = std::make_shared<Machine>(comm, call, touched, stream->id, captured);
    return Started{[machine] { return machine->poll(); }, [machine] { return machine->state(); }};
  };
  op.graph_reference = [comm](int change) { comm->graphs += change; };
  return op;
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: not_emulated("NCCL data type " + std::to_string(type));
  }
}

ncclResult_t issue(const std::shared_ptr<Comm>& comm, const CollectiveCall& call, cudaStream_t stream) {
  if (!comm->complete() || comm->finalizing || comm->pretended_polls > 0) {
    report(std::string(name_of(call.kind)) +
           ": the communicator is not ready (a call on it is still in progress)");
    return ncclInvalidUsage;
  }
  if (comm->aborted) return ncclInvalidUsage;
  if (comm->error != ncclSuccess) return comm->error;
  if (ncclResult_t r = check_call(*comm, call); r != ncclSuccess) return r;
  if (call.count == 0) return ncclSuccess;
  if (check_stream(stream, name_of(call.kind)) != cudaSuccess) return ncclInvalidArgument;
  Op op = make_op(comm, call, stream->capture != nullptr);
  if (group_depth > 0) {
    group.push_back({comm, stream, std::move(op)});
    return ncclSuccess;
  }
  return enqueue_collective(comm, stream, std::move(op));
}

}  // namespace cudaemu

using namespace cudaemu;

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  Lock lock;
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth > 0) return ncclSuccess;
  std::vector<Pending> calls;
  calls.swap(group);
  ncclResult_t result = ncclSuccess;
  for (Pending& call : calls) {
    const ncclResult_t r = enqueue_collective(call.comm, call.stream, std::move(call.op));
    if (r != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) result = r;
  }
  return result;
}

}  // extern "C"

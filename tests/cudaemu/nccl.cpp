// NCCL's entry points: communicators and the calls on them.
#include <algorithm>
#include <cstring>

#include "tests/cudaemu/nccl_comm.h"

struct ncclComm {
  std::shared_ptr<cudaemu::Comm> comm;
};

using namespace cudaemu;

namespace {

constexpr unsigned kConfigMagic = 0xcafebeef;

// Waits, running this rank's own work, until done() or the deadlock limit.
void wait_for(const std::function<bool()>& done, const std::shared_ptr<Comm>& comm, const char* what) {
  run_until(
      [&] {
        comm->check_peers();
        return done() || comm->error != ncclSuccess;
      },
      nullptr,
      [&] {
        std::string text = std::string(what) + " waits for rank";
        for (int r = 0; r < comm->size; ++r)
          if (comm->state(r).pid.load() == 0 || (comm->finalizing && comm->state(r).left.load() == 0))
            text += " " + std::to_string(r);
        return text;
      });
}

ncclResult_t join(ncclComm_t* out, const std::string& name, int rank, int size, bool blocking,
                  const char* what) {
  ncclResult_t result;
  auto comm = Comm::join(name, rank, size, blocking, &result);
  *out = nullptr;
  if (comm == nullptr) return result;
  set_identity("rank " + std::to_string(rank) + " of " + std::to_string(size));
  if (blocking) {
    wait_for([&] { return comm->complete(); }, comm, what);
    if (comm->error != ncclSuccess) return comm->error;
  }
  *out = new ncclComm{comm};
  return blocking || comm->complete() ? ncclSuccess : ncclInProgress;
}

bool blocking_of(const ncclConfig_t* config, bool inherited) {
  return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? inherited : config->blocking != 0;
}

bool valid(const ncclConfig_t* config) {
  return config == nullptr ||
         (config->magic == kConfigMagic && config->size == sizeof(ncclConfig_t) &&
          (config->blocking == NCCL_CONFIG_UNDEF_INT || config->blocking == 0 || config->blocking == 1));
}

bool quiescent(const Comm& c) {
  if (c.finished < c.issued) return false;
  for (int r = 0; r < c.size; ++r)
    if (c.state(r).left.load() == 0) return false;
  return true;
}

void check_graphs(const Comm& c, const char* what) {
  if (c.graphs > 0)
    report(std::string(what) +
           ": executable graphs with collectives of this communicator are alive; NCCL would wait "
           "for them for ever");
}

double host_scalar(const void* p, ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: return *static_cast<const double*>(p);
    case ncclFloat32: return static_cast<double>(*static_cast<const float*>(p));
    default: not_emulated(std::string("PreMulSum of ") + name_of(type) + " with a host factor");
  }
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  return comm == nullptr ? "" : comm->comm->error_text.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Lock lock;
  const std::string name = create_segment();
  if (name.empty()) return ncclSystemError;
  *id = {};
  std::memcpy(id->internal, name.c_str(), std::min(name.size(), sizeof id->internal - 1));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  Lock lock;
  if (out == nullptr || !valid(config)) return ncclInvalidArgument;
  return join(out, std::string(id.internal, strnlen(id.internal, sizeof id.internal)), rank, size,
              blocking_of(config, true), "ncclCommInitRank");
}

ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  Lock lock;
  if (handle == nullptr) return ncclInvalidArgument;
  Comm& c = *handle->comm;
  run_any();
  c.check_peers();
  const bool busy = !c.complete() || c.pretended_polls > 0 || (c.finalizing && !quiescent(c));
  if (c.pretended_polls > 0) --c.pretended_polls;
  *result = c.error != ncclSuccess ? c.error : busy ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Lock lock;
  if (handle == nullptr || handle->comm->finalizing) return ncclInvalidArgument;
  const auto comm = handle->comm;
  check_graphs(*comm, "ncclCommFinalize");
  comm->finalizing = true;
  if (!comm->blocking) {
    comm->leave(1);  // the collectives issued before still take part
    return quiescent(*comm) ? ncclSuccess : ncclInProgress;
  }
  wait_for([&] { return comm->finished >= comm->issued; }, comm, "ncclCommFinalize");
  comm->leave(1);
  wait_for([&] { return quiescent(*comm); }, comm, "ncclCommFinalize");
  return comm->error;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  Lock lock;
  if (handle == nullptr) return ncclSuccess;
  const auto comm = handle->comm;
  check_graphs(*comm, "ncclCommDestroy");
  if (!comm->registered.empty()) report("ncclCommDestroy: buffers are still registered");
  if (!comm->aborted) wait_for([&] { return comm->finished >= comm->issued; }, comm, "ncclCommDestroy");
  comm->leave(1);
  delete handle;
  return comm->error == ncclSuccess || comm->error == ncclRemoteError ? ncclSuccess : comm->error;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  Lock lock;
  if (handle == nullptr) return ncclSuccess;
  handle->comm->aborted = true;
  handle->comm->leave(2);
  delete handle;
  return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  Lock lock;
  if (handle == nullptr || out == nullptr || !valid(config)) return ncclInvalidArgument;
  const auto comm = handle->comm;
  const uint64_t round = ++comm->splits;
  comm->mine().split_color[round % 2] = color;
  comm->mine().split_key[round % 2] = key;
  comm->mine().split_posted.store(round);
  wait_for(
      [&] {
        for (int r = 0; r < comm->size; ++r)
          if (comm->state(r).split_posted.load() < round) return false;
        return true;
      },
      comm, "ncclCommSplit");
  *out = nullptr;
  if (comm->error != ncclSuccess) return comm->error;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int r = 0; r < comm->size; ++r)
    if (comm->state(r).split_color[round % 2] == color)
      members.push_back({comm->state(r).split_key[round % 2], r});
  std::sort(members.begin(), members.end());
  const auto me = std::find(members.begin(), members.end(), std::make_pair(key, comm->rank));
  return join(out, comm->name + "-s" + std::to_string(round) + "c" + std::to_string(color),
              static_cast<int>(me - members.begin()), static_cast<int>(members.size()),
              blocking_of(config, comm->blocking), "ncclCommSplit");
}

ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int count, ncclComm_t* out,
                            ncclConfig_t* config, int flags) {
  Lock lock;
  if (handle == nullptr || out == nullptr || count < 1 || !valid(config)) return ncclInvalidArgument;
  const auto comm = handle->comm;
  if (flags == NCCL_SHRINK_ABORT)
    comm->aborted = true;
  else
    wait_for([&] { return comm->finished >= comm->issued; }, comm, "ncclCommShrink");
  const std::vector<int> gone(excluded, excluded + count);
  const auto is_gone = [&](int r) { return std::find(gone.begin(), gone.end(), r) != gone.end(); };
  if (is_gone(comm->rank)) return ncclInvalidArgument;
  int rank = 0, size = 0;
  for (int r = 0; r < comm->size; ++r) {
    if (is_gone(r)) continue;
    if (r < comm->rank) ++rank;
    ++size;
  }
  return join(out, comm->name + "-k" + std::to_string(++comm->splits), rank, size,
              blocking_of(config, comm->blocking), "ncclCommShrink");
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  if (handle == nullptr || count == nullptr) return ncclInvalidArgument;
  *count = handle->comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  if (handle == nullptr || rank == nullptr) return ncclInvalidArgument;
  *rank = handle->comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** p, size_t bytes) {
  return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* p) {
  return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommRegister(const ncclComm_t handle, void* p, size_t bytes, void** registration) {
  Lock lock;
  if (handle == nullptr || registration == nullptr) return ncclInvalidArgument;
  char* base = nullptr;
  const Block* block = is_device(p) ? find_block(p, &base) : nullptr;
  if (block == nullptr || block->freed || static_cast<char*>(p) + bytes > base + block->bytes)
    return ncclInvalidArgument;
  auto& list = handle->comm->registered;
  list.push_back({static_cast<char*>(p), bytes});
  *registration = p;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registration) {
  Lock lock;
  if (handle == nullptr) return ncclInvalidArgument;
  auto& list = handle->comm->registered;
  const auto it =
      std::find_if(list.begin(), list.end(), [&](const auto& r) { return r.first == registration; });
  if (it == list.end()) return ncclInvalidArgument;
  list.erase(it);
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  Lock lock;
  if (op == nullptr || scalar == nullptr || handle == nullptr) return ncclInvalidArgument;
  auto& factors = handle->comm->factors;
  const bool on_device = residence == ncclScalarDevice;
  factors.push_back({true, type, on_device ? 1.0 : host_scalar(scalar, type), on_device ? scalar : nullptr});
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(factors.size()) - 1);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  Lock lock;
  if (handle == nullptr || op < ncclNumOps) return ncclInvalidArgument;
  const auto i = static_cast<size_t>(op - ncclNumOps);
  auto& factors = handle->comm->factors;
  if (i >= factors.size() || !factors[i].alive) return ncclInvalidArgument;
  factors[i].alive = false;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t handle, cudaStream_t stream) {
  Lock lock;
  if (handle == nullptr) return ncclInvalidArgument;
  return issue(handle->comm, {Collective::kAllReduce, in, out, count, type, op, 0}, stream);
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t handle, cudaStream_t stream) {
  Lock lock;
  if (handle == nullptr) return ncclInvalidArgument;
  return issue(handle->comm, {Collective::kBroadcast, in, out, count, type, ncclSum, root}, stream);
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t handle,
                           cudaStream_t stream) {
  Lock lock;
  if (handle == nullptr) return ncclInvalidArgument;
  return issue(handle->comm, {Collective::kAllGather, in, out, count, type, ncclSum, 0}, stream);
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t handle, cudaStream_t stream) {
  Lock lock;
  if (handle == nullptr) return ncclInvalidArgument;
  return issue(handle->comm, {Collective::kReduceScatter, in, out, count, type, op, 0}, stream);
}

}  // extern "C"

#include "tests/cudaemu/nccl_comm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace cudaemu {
namespace {

constexpr size_t kHeader = (sizeof(Segment) + 4095) / 4096 * 4096;
constexpr size_t kSegmentBytes =
    kHeader + 2 * kMaxRanks * kSlotBytes;  // sparse: only what is used takes memory

std::vector<Comm*>& live() {
  static auto* list = new std::vector<Comm*>;
  return *list;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void beat() {
  for (const Comm* c : live()) c->mine().heartbeat.fetch_add(1);
}

bool peers_moved() {
  static uint64_t last = 0;
  uint64_t sum = 0;
  for (const Comm* c : live())
    for (int r = 0; r < c->size; ++r)
      if (r != c->rank) sum += c->state(r).heartbeat.load();
  const bool moved = sum != last;
  last = sum;
  return moved;
}

int open_segment(const std::string& name) {
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(kSegmentBytes)) != 0) {
    close(file);
    return -1;
  }
  return file;
}

// Every rank locks the byte of its number; the kernel drops the lock when the process ends, however it ends.
bool lock_byte(int file, int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file, F_SETLK, &lock) == 0;
}

bool holds_byte(int file, int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kAllReduce: return "ncclAllReduce";
    case Collective::kBroadcast: return "ncclBroadcast";
    case Collective::kAllGather: return "ncclAllGather";
    default: return "ncclReduceScatter";
  }
}

const char* name_of(ncclDataType_t type) {
  static const char* const names[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                      "uint64", "float16", "float32", "float64", "bfloat16"};
  return type >= 0 && type < 10 ? names[type] : "unknown type";
}

bool Descriptor::agrees(const Descriptor& o) const {
  return number == o.number && count == o.count && kind == o.kind && type == o.type && op == o.op &&
         root == o.root && captured == o.captured;
}

std::string Descriptor::text() const {
  static const char* const ops[] = {"sum", "prod", "max", "min", "avg"};
  std::string out = std::string(name_of(kind)) + "(" + std::to_string(count) + " " +
                    name_of(static_cast<ncclDataType_t>(type));
  if (kind == Collective::kAllReduce || kind == Collective::kReduceScatter)
    out += std::string(", ") + (op < 5 ? ops[op] : "premulsum");
  if (kind == Collective::kBroadcast) out += ", root " + std::to_string(root);
  return out + (captured != 0 ? ", captured" : "") + ") on stream " + std::to_string(stream);
}

std::string create_segment() {
  static int next = 0;
  const std::string name = "/cudaemu-" + std::to_string(getpid()) + "-" +
                           std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + "-" +
                           std::to_string(next++);
  const int file = open_segment(name);
  if (file < 0) return "";
  close(file);
  return name;
}

std::shared_ptr<Comm> Comm::join(const std::string& name, int rank, int size, bool blocking,
                                 ncclResult_t* result) {
  *result = ncclInvalidArgument;
  if (size < 1 || rank < 0 || rank >= size) return nullptr;
  if (size > kMaxRanks) not_emulated("more than 16 ranks");
  *result = ncclInvalidUsage;
  for (const Comm* c : live())
    if (c->name == name) return nullptr;  // two ranks in one process, on one device: refused as NCCL does
  *result = ncclSystemError;
  std::shared_ptr<Comm> comm(new Comm);
  comm->name = name;
  comm->rank = rank;
  comm->size = size;
  comm->blocking = blocking;
  comm->file_ = open_segment(name);
  if (comm->file_ < 0) return nullptr;
  void* map = mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, comm->file_, 0);
  if (map == MAP_FAILED) return nullptr;
  comm->segment_ = static_cast<Segment*>(map);
  comm->data_ = static_cast<char*>(map) + kHeader;
  *result = ncclInvalidUsage;
  int32_t expected = 0;
  comm->segment_->ranks.compare_exchange_strong(expected, size);
  if (comm->segment_->ranks.load() != size) {
    report("ncclCommInitRank: rank " + std::to_string(rank) + " says " + std::to_string(size) +
           " ranks, another said " + std::to_string(comm->segment_->ranks.load()));
    return nullptr;
  }
  if (!lock_byte(comm->file_, rank) || comm->mine().pid.exchange(getpid()) != 0) {
    report("ncclCommInitRank: rank " + std::to_string(rank) + " is taken twice");
    return nullptr;
  }
  if (comm->segment_->joined.fetch_add(1) + 1 == size) shm_unlink(name.c_str());
  live().push_back(comm.get());
  peers_progress = peers_moved;
  tell_peers = beat;
  *result = ncclSuccess;
  return comm;
}

Comm::~Comm() {
  auto& list = live();
  list.erase(std::remove(list.begin(), list.end(), this), list.end());
  if (segment_ != nullptr) {
    if (!complete()) shm_unlink(name.c_str());
    munmap(segment_, kSegmentBytes);
  }
  if (file_ >= 0) close(file_);
}

char* Comm::slot(int r, uint64_t chunk) const {
  return data_ + (static_cast<size_t>(r) * 2 + chunk % 2) * kSlotBytes;
}

void Comm::check_peers() {
  const double now_s = now_seconds();
  if (error != ncclSuccess || now_s - last_check_ < 0.005) return;
  last_check_ = now_s;
  const auto who = [this](int r) {
    return "rank " + std::to_string(r) + " (pid " + std::to_string(state(r).pid.load()) + ")";
  };
  for (int r = 0; r < size; ++r)
    if (r != rank && state(r).pid.load() != 0 && !holds_byte(file_, r) && state(r).left.load() == 0)
      return set_error(ncclRemoteError, who(r) + " has died");
  for (int r = 0; r < size; ++r)  // those that gave up, perhaps because of a death, come second
    if (r != rank && state(r).left.load() == 2)
      return set_error(ncclRemoteError, who(r) + " has aborted the communicator");
}

void Comm::leave(int how) { mine().left.store(how); }

void Comm::set_error(ncclResult_t result, const std::string& text) {
  if (error != ncclSuccess) return;
  error = result;
  error_text = text;
  std::fprintf(stderr, "cudaemu: rank %d of %d: %s\n", rank, size, text.c_str());
}

}  // namespace cudaemu

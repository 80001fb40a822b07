// Ranks that are processes of one machine, over shared memory.
//
// Each rank has two slots that it fills in turn, and a stage number that it raises when a slot is filled, or
// when its share of a sum lies in it. All ranks raise their stages in the same order, so one comparison tells
// whether a peer has come that far. A rank fills the slot of chunk k again at chunk k+2: by then all have
// announced chunk k+1, so have read chunk k.
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <sstream>

#include "distributed/backends.h"
#include "distributed/digest.h"
#include "distributed/reduce.h"
#include "distributed/store.h"

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kSlot = 256 << 10;
constexpr std::size_t kSmall = 8 << 10;  // up to here every rank sums everything: one stage instead of two
constexpr std::chrono::microseconds kSpin{40};
constexpr milliseconds kLook{50};  // between two looks at whether the peers live

// What the ranks see of one another. Lies in shared memory; zero at first.
struct alignas(64) Seat {
  std::atomic<std::uint32_t> stage;    // also the futex
  std::atomic<std::uint32_t> waiters;  // sleeping until the stage rises
  std::atomic<std::uint32_t> left;     // the rank takes part no more
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

bool reached(std::uint32_t stage, std::uint32_t wanted) {
  return static_cast<std::int32_t>(stage - wanted) >= 0;
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, milliseconds limit) {
  const timespec time{0, static_cast<long>(limit.count()) * 1'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}
void futex_wake(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int usable_cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

// The mapping that all ranks share: the seats, then two slots a rank.
class Region {
 public:
  Region(int fd, int ranks) : size_(bytes(ranks)), ranks_(static_cast<std::size_t>(ranks)) {
    void* base = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    base_ = base == MAP_FAILED ? nullptr : static_cast<char*>(base);
  }
  ~Region() {
    if (base_ != nullptr) ::munmap(base_, size_);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static std::size_t bytes(int ranks) { return static_cast<std::size_t>(ranks) * (sizeof(Seat) + 2 * kSlot); }
  bool mapped() const { return base_ != nullptr; }
  Seat& seat(int rank) const { return *std::launder(reinterpret_cast<Seat*>(base_) + rank); }
  char* slot(int rank, std::uint32_t turn) const {
    return base_ + ranks_ * sizeof(Seat) + (2 * static_cast<std::size_t>(rank) + turn % 2) * kSlot;
  }

 private:
  const std::size_t size_, ranks_;
  char* base_ = nullptr;
};

// A peer's process: has it ended, reaped or not?
class Process {
 public:
  explicit Process(pid_t pid) : fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {}
  Process(Process&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Process& operator=(Process&&) = delete;
  ~Process() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool known() const { return fd_ >= 0; }
  bool ended() const {
    pollfd p{fd_, POLLIN, 0};
    return ::poll(&p, 1, 0) > 0;
  }

 private:
  int fd_;
};

class ShmCommunicator : public Communicator {
 public:
  ShmCommunicator(std::unique_ptr<Region> region, std::vector<Process> peers, int rank, milliseconds timeout)
      : region_(std::move(region)),
        peers_(std::move(peers)),
        rank_(rank),
        timeout_(timeout),
        spin_(usable_cores() >= size() ? kSpin : std::chrono::microseconds(0)) {}
  ~ShmCommunicator() override { leave(); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }

  void all_reduce(void* data, std::size_t count, DType dtype) override {
    const std::size_t width = reducible_size(dtype);
    guard("AllReduce", [&] {
      in_chunks(count, kSlot / width, [&](std::size_t begin, std::size_t n) {
        char* at = static_cast<char*>(data) + begin * width;
        n* width <= kSmall ? reduce_small(at, n, dtype) : reduce_shares(at, n, dtype, width);
      });
    });
  }

  void all_gather(const void* data, std::size_t bytes, void* out) override {
    guard("AllGather", [&] {
      in_chunks(bytes, kSlot, [&](std::size_t begin, std::size_t n) {
        std::memcpy(open_slot(), static_cast<const char*>(data) + begin, n);
        announce();
        for (int r = 0; r < size(); ++r) {
          if (r != rank_) await(r);
          std::memcpy(static_cast<char*>(out) + static_cast<std::size_t>(r) * bytes + begin, slot_of(r), n);
        }
      });
    });
  }

  void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) override {
    const std::size_t width = reducible_size(dtype), ranks = peers_.size();
    guard("ReduceScatter", [&] {
      in_chunks(count, kSlot / width / ranks, [&](std::size_t begin, std::size_t n) {
        char* slot = open_slot();
        for (std::size_t r = 0; r < ranks; ++r) {
          std::memcpy(slot + r * n * width, static_cast<const char*>(in) + (r * count + begin) * width,
                      n * width);
        }
        announce();
        await_all();
        ordered_sum(parts(static_cast<std::size_t>(rank_) * n * width), n, dtype,
                    static_cast<char*>(out) + begin * width);
      });
    });
  }

  void broadcast(void* data, std::size_t bytes, int root) override {
    CHECK(root >= 0 && root < size(), root);
    guard("Broadcast", [&] {
      in_chunks(bytes, kSlot, [&](std::size_t begin, std::size_t n) {
        char* at = static_cast<char*>(data) + begin;
        char* slot = open_slot();
        if (rank_ == root) std::memcpy(slot, at, n);
        announce();
        if (rank_ == root) return;
        await(root);
        std::memcpy(at, slot_of(root), n);
      });
    });
  }

  void barrier() override {
    guard("Barrier", [&] {
      open_slot();
      announce();
      await_all();
    });
  }

  void abort(const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = reason;
    has_aborted_.store(true);
    // The waiting thread looks at it at least every kLook.
  }

 private:
  // ---- the steps of a collective

  template <class Body>
  void in_chunks(std::size_t count, std::size_t most, const Body& body) {
    for (std::size_t begin = 0; begin < count; begin += most) body(begin, std::min(most, count - begin));
  }

  // Starts a chunk: the slot to fill, once nobody reads what it held.
  char* open_slot() {
    const std::uint32_t previous = opened_;
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) await(r, previous);
    }
    ++turn_;
    opened_ = stage_ + 1;
    return slot_of(rank_);
  }
  // Raises this rank's stage: what it has written so far may be read.
  void announce() {
    Seat& own = region_->seat(rank_);
    own.stage.store(++stage_);
    if (own.waiters.load() > 0) futex_wake(own.stage);
  }
  void await(int peer) { await(peer, stage_); }
  void await_all() {
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) await(r);
    }
  }
  char* slot_of(int rank) const { return region_->slot(rank, turn_); }
  std::vector<const void*> parts(std::size_t offset) const {
    std::vector<const void*> all;
    for (int r = 0; r < size(); ++r) all.push_back(slot_of(r) + offset);
    return all;
  }

  void reduce_small(char* data, std::size_t count, DType dtype) {
    std::memcpy(open_slot(), data, count * reducible_size(dtype));
    announce();
    await_all();
    ordered_sum(parts(0), count, dtype, data);
  }

  // Each rank sums its share, in its own slot and its own data, then all copy the others' shares.
  void reduce_shares(char* data, std::size_t count, DType dtype, std::size_t width) {
    char* slot = open_slot();
    const Span own = share_of(count, rank_, size());
    const std::size_t begin = own.begin * width, end = own.end * width;
    std::memcpy(slot, data, begin);
    std::memcpy(slot + end, data + end, count * width - end);
    announce();
    await_all();
    auto all = parts(begin);
    all[static_cast<std::size_t>(rank_)] = data + begin;
    ordered_sum(all, own.count(), dtype, data + begin);
    std::memcpy(slot + begin, data + begin, end - begin);
    announce();
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      await(r);
      const Span share = share_of(count, r, size());
      std::memcpy(data + share.begin * width, slot_of(r) + share.begin * width, share.count() * width);
    }
  }

  // ---- waiting

  // Until `peer` has reached `wanted`: first awake, for it is mostly there at once, then asleep.
  void await(int peer, std::uint32_t wanted) {
    Seat& seat = region_->seat(peer);
    if (reached(seat.stage.load(std::memory_order_acquire), wanted)) return;
    if (spin_.count() > 0) {
      for (const auto end = Clock::now() + spin_; Clock::now() < end;) {
        for (int i = 0; i < 20; ++i) {
          if (reached(seat.stage.load(std::memory_order_acquire), wanted)) return;
          pause_cpu();
        }
      }
    }
    seat.waiters.fetch_add(1);
    try {
      sleep(peer, seat, wanted);
    } catch (...) {
      seat.waiters.fetch_sub(1);
      throw;
    }
    seat.waiters.fetch_sub(1);
  }

  void sleep(int peer, Seat& seat, std::uint32_t wanted) {
    const auto deadline = Clock::now() + timeout_;
    for (std::uint32_t stage; !reached(stage = seat.stage.load(), wanted);) {
      if (has_aborted_.load()) {
        const std::lock_guard lock(mutex_);
        throw PeerError(aborted_);
      }
      const bool gone = seat.left.load() != 0 || peers_[static_cast<std::size_t>(peer)].ended();
      if (gone && !reached(seat.stage.load(), wanted)) throw PeerError(cat("rank ", peer, " has ended"));
      if (Clock::now() > deadline) {
        throw PeerError(cat("rank ", peer, " did not arrive within ",
                            static_cast<double>(timeout_.count()) / 1000, " s"));
      }
      if (!gone) futex_wait(seat.stage, stage, kLook);
    }
  }

  void leave() {
    Seat& own = region_->seat(rank_);
    own.left.store(1);
    futex_wake(own.stage);
  }

  template <class Body>
  void guard(const char* op, const Body& body) {
    if (!failure_.empty()) throw PeerError(failure_);
    try {
      if (has_aborted_.load()) {
        const std::lock_guard lock(mutex_);
        throw PeerError(aborted_);
      }
      body();
    } catch (const PeerError& error) {
      failure_ = cat(op, " failed: ", error.what());
      leave();
      throw PeerError(failure_);
    }
  }

  const std::unique_ptr<Region> region_;
  const std::vector<Process> peers_;
  const int rank_;
  const milliseconds timeout_;
  const std::chrono::microseconds spin_;
  std::uint32_t stage_ = 0, opened_ = 0, turn_ = 0;
  std::string failure_;  // of an earlier collective
  std::mutex mutex_;
  std::string aborted_;
  std::atomic<bool> has_aborted_{false};
};

// ---- meeting

struct Descriptor {
  explicit Descriptor(int f) : fd(f) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

// Rank 0 makes the memory; its place in /proc and its random name go to the others.
int create_region(const CommunicatorOptions& options, const std::string& scope) {
  unsigned char token[16];
  fill_random(token, sizeof(token));
  const std::string name = "onnx-ddp-" + to_hex(token, sizeof(token));
  int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd >= 0 && ::ftruncate(fd, static_cast<off_t>(Region::bytes(options.size))) != 0) {
    ::close(fd);
    fd = -1;
  }
  options.store->set(scope + "/region", cat(::getpid(), ' ', fd, ' ', name));
  return fd;
}

// The others open it; on another machine the path does not exist, or is something else and left alone.
int open_region(const CommunicatorOptions& options, const std::string& scope) {
  std::istringstream in(options.store->get(scope + "/region", options.timeout));
  long pid = 0, number = -1;
  std::string name;
  in >> pid >> number >> name;
  const std::string path = cat("/proc/", pid, "/fd/", number);
  char target[256] = "";
  if (::readlink(path.c_str(), target, sizeof(target) - 1) < 0 || target != "/memfd:" + name + " (deleted)")
    return -1;
  return ::open(path.c_str(), O_RDWR | O_CLOEXEC);
}

// Every rank's word on one question, in rank order.
std::vector<long> ask_all(const CommunicatorOptions& options, const std::string& question, long own) {
  options.store->set(cat(question, "/", options.rank), cat(own));
  std::vector<long> answers;
  for (int r = 0; r < options.size; ++r) {
    answers.push_back(
        std::strtol(options.store->get(cat(question, "/", r), options.timeout).c_str(), nullptr, 10));
  }
  return answers;
}

}  // namespace

std::unique_ptr<Communicator> try_shm_communicator(const CommunicatorOptions& options,
                                                   const std::string& communicator_scope) {
  const std::string scope = communicator_scope + "/shm";
  const Descriptor file(options.rank == 0 ? create_region(options, scope) : open_region(options, scope));
  auto region = file.fd >= 0 ? std::make_unique<Region>(file.fd, options.size) : nullptr;
  const bool usable = region != nullptr && region->mapped();
  bool ready = true;
  std::vector<Process> peers;
  for (const long pid : ask_all(options, scope + "/pid", usable ? ::getpid() : 0)) {
    peers.emplace_back(static_cast<pid_t>(pid));
    ready &= pid != 0 && peers.back().known();
  }
  // Nobody goes on, and perhaps ends, before all know all.
  const auto all = ask_all(options, scope + "/ready", ready ? 1 : 0);
  if (std::count(all.begin(), all.end(), 1) != options.size) return nullptr;
  return std::make_unique<ShmCommunicator>(std::move(region), std::move(peers), options.rank,
                                           options.timeout);
}

}  // namespace onnxddp

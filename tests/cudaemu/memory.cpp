// Device memory in an address range of its own, pinned host memory, and the trap for whoever touches either
// at the wrong time. An allocation ends at a page without rights, begins poisoned, and is never reused after
// its end.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/cudaemu/core.h"

namespace cudaemu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArenaBytes = size_t{1} << 40;
constexpr size_t kAlign = 256;  // cudaMalloc's promise

char* arena = nullptr;
size_t arena_top = 0;
size_t bytes_in_use = 0;
int protection_key = -1;
const std::string* running = nullptr;  // the operation that may touch device memory now, and its thread
pthread_t running_thread;
struct sigaction former_action = {};

std::map<char*, Block>& blocks() {
  static auto* m = new std::map<char*, Block>;
  return *m;
}
std::map<char*, Pinned>& pinned_buffers() {
  static auto* m = new std::map<char*, Pinned>;
  return *m;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

bool in_operation() { return running != nullptr && pthread_equal(running_thread, pthread_self()) != 0; }

void on_bad_address(int, siginfo_t* info, void*) {
  const auto* p = static_cast<const char*>(info->si_addr);
  char address[32];
  std::snprintf(address, sizeof address, "%p", info->si_addr);
  if (arena != nullptr && p >= arena && p < arena + kArenaBytes) {
    const std::string where = std::string(" at ") + address + ", " + describe_address(p);
    if (!in_operation()) fault(kFaultHost, "the host touches device memory" + where);
    char* base = nullptr;
    const Block* block = find_block(p, &base);
    const char* what = block == nullptr || p >= base + std::max<size_t>(block->bytes, 1) ? "out of bounds"
                       : block->freed                                                    ? "use after free"
                                      : "undeclared buffer";
    fault(kFaultKernel, *running + ": " + what + where);
  }
  if (const Pinned* pin = find_pinned(p); pin != nullptr && (pin->readers > 0 || pin->writers > 0))
    fault(kFaultPinned,
          std::string("the host uses a pinned buffer while a copy may still use it, at ") + address);
  if (in_operation()) fault(kFaultKernel, *running + ": bad address " + address);
  sigaction(SIGSEGV, &former_action, nullptr);  // not ours: fault again, as without the emulator
}

void set_up_arena() {
  if (arena != nullptr) return;
  config();
  auto* wish = reinterpret_cast<void*>(uintptr_t{0x200000000000});
  void* p = mmap(wish, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fault(kFaultOther, "cannot reserve the device address range");
  arena = static_cast<char*>(p);
#if defined(__x86_64__)
  if (config().pkeys) protection_key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
  struct sigaction action = {};
  action.sa_sigaction = on_bad_address;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &former_action);
}

// Closed pages stay closed to all; a page that an operation opens by mprotect stays closed to other threads
// where there is a protection key.
void set_closed(char* map, size_t bytes, [[maybe_unused]] int key) {
#if defined(__x86_64__)
  if (protection_key >= 0) {
    pkey_mprotect(map, bytes, PROT_NONE, key);
    return;
  }
#endif
  mprotect(map, bytes, PROT_NONE);
}

void open_block(const Block& b, bool open) {
  mprotect(b.map, b.map_bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// Red zones: from the first page to the block, and from its last byte to the next multiple of kAlign.
bool zone_intact(const char* from, const char* to) {
  for (; from < to; ++from) {
    const auto expected = reinterpret_cast<uintptr_t>(from) % 2 == 0 ? kPoison & 0xFF : kPoison >> 8;
    if (static_cast<unsigned char>(*from) != expected) return false;
  }
  return true;
}

void check_block(char* base, Block& b, const std::string& culprit) {
  const char* end = b.map + b.map_bytes;
  const char* front = std::max<const char*>(b.map, base - kAlign);
  if (zone_intact(front, base) && zone_intact(base + b.bytes, end)) return;
  report(culprit + ": out of bounds, wrote outside buffer " + std::to_string(b.number) + " (" +
         std::to_string(b.bytes) + " bytes)");
  poison(const_cast<char*>(front), static_cast<size_t>(base - front));
  for (char* p = base + b.bytes; p < end; ++p)
    *p = static_cast<char>(reinterpret_cast<uintptr_t>(p) % 2 == 0 ? kPoison & 0xFF : kPoison >> 8);
}

cudaError_t allocate_pinned(void** p, size_t bytes, unsigned flags) {
  set_up_arena();
  if (cudaError_t e = unsafe_call()) return fail(e);
  if (bytes == 0) {
    *p = nullptr;
    return cudaSuccess;
  }
  const size_t map_bytes = round_up(bytes, kPage);
  void* map = mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  poison(map, map_bytes);
  *p = map;
  pinned_buffers()[static_cast<char*>(map)] = {static_cast<char*>(map), bytes, map_bytes, flags, false, 0, 0};
  return cudaSuccess;
}

}  // namespace

void IntervalSet::add(size_t from, size_t to) {
  if (from >= to) return;
  auto it = spans_.upper_bound(from);
  if (it != spans_.begin() && std::prev(it)->second >= from) {
    --it;
    from = it->first;
    to = std::max(to, it->second);
    it = spans_.erase(it);
  }
  while (it != spans_.end() && it->first <= to) {
    to = std::max(to, it->second);
    it = spans_.erase(it);
  }
  spans_[from] = to;
}

bool IntervalSet::covers(size_t from, size_t to) const {
  if (from >= to) return true;
  auto it = spans_.upper_bound(from);
  return it != spans_.begin() && std::prev(it)->second >= to;
}

bool is_device(const void* p) {
  const auto* c = static_cast<const char*>(p);
  return arena != nullptr && c >= arena && c < arena + kArenaBytes;
}

Block* find_block(const void* p, char** base) {
  auto* c = const_cast<char*>(static_cast<const char*>(p));
  auto it = blocks().upper_bound(c);
  if (it == blocks().begin()) return nullptr;
  --it;
  if (c > it->first + it->second.bytes) return nullptr;
  *base = it->first;
  return &it->second;
}

std::string describe_address(const void* p) {
  auto* c = const_cast<char*>(static_cast<const char*>(p));
  auto it = blocks().upper_bound(c);
  if (it == blocks().begin()) return "outside of every buffer";
  --it;
  const Block& b = it->second;
  return std::string(b.freed ? "freed " : "") + "buffer " + std::to_string(b.number) + " (" +
         std::to_string(b.bytes) + " bytes) + " + std::to_string(c - it->first);
}

DeviceOpen::DeviceOpen(const std::vector<Access>& touched, const std::string& operation) {
  running = &operation;
  running_thread = pthread_self();
#if defined(__x86_64__)
  if (protection_key >= 0) pkey_set(protection_key, 0);
#endif
  for (const Access& a : touched) {
    char* base = nullptr;
    Block* b = a.bytes > 0 && is_device(a.data) ? find_block(a.data, &base) : nullptr;
    if (b == nullptr || b->freed || std::find(opened_.begin(), opened_.end(), b) != opened_.end()) continue;
    open_block(*b, true);
    opened_.push_back(b);
  }
}

DeviceOpen::~DeviceOpen() {
  for (Block* b : opened_) {
    check_block(b->map + b->map_bytes - round_up(b->bytes, kAlign), *b, *running);
    open_block(*b, false);
  }
#if defined(__x86_64__)
  if (protection_key >= 0) pkey_set(protection_key, PKEY_DISABLE_ACCESS);
#endif
  running = nullptr;
}

Pinned* find_pinned(const void* p) {
  auto* c = const_cast<char*>(static_cast<const char*>(p));
  auto it = pinned_buffers().upper_bound(c);
  if (it == pinned_buffers().begin()) return nullptr;
  --it;
  return c < it->first + std::max(it->second.bytes, it->second.map_bytes) ? &it->second : nullptr;
}

bool is_mapped(const void* p) {
  const Pinned* pin = find_pinned(p);
  return pin != nullptr && (pin->flags & cudaHostAllocMapped) != 0;
}

void protect_pinned(const Pinned& pinned, bool open) {
  if (pinned.registered || (pinned.flags & cudaHostAllocMapped) != 0) return;
  int rights = PROT_READ | PROT_WRITE;
  if (!open && pinned.readers > 0) rights = PROT_READ;
  if (!open && pinned.writers > 0) rights = PROT_NONE;
  mprotect(pinned.base, pinned.map_bytes, rights);
}

void open_all_pinned(bool open) {
  for (auto& [base, pin] : pinned_buffers())
    if (pin.readers > 0 || pin.writers > 0) protect_pinned(pin, open);
}

void poison(void* p, size_t bytes) {
  auto* c = static_cast<unsigned char*>(p);
  size_t i = 0;
  if (reinterpret_cast<uintptr_t>(c) % 2 == 1 && bytes > 0) c[i++] = kPoison >> 8;
  for (; i + 1 < bytes; i += 2) {
    c[i] = kPoison & 0xFF;
    c[i + 1] = kPoison >> 8;
  }
  if (i < bytes) c[i] = kPoison & 0xFF;
}

size_t find_poison(const void* p, size_t bytes) {
  const auto* c = static_cast<const char*>(p);
  const uint32_t pattern = kPoison * 0x10001u;
  for (size_t i = 0; i + 4 <= bytes; i += 4)
    if (std::memcmp(c + i, &pattern, 4) == 0) return i;
  return std::string::npos;
}

std::uint64_t device_bytes() {
  Lock lock;
  return bytes_in_use;
}

}  // namespace cudaemu

using namespace cudaemu;  // the C entry points below are the emulator's face

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
  Lock lock;
  set_up_arena();
  if (p == nullptr) return fail(cudaErrorInvalidValue);
  if (cudaError_t e = unsafe_call()) return fail(e);
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > config().memory || bytes_in_use + bytes > config().memory)
    return fail(cudaErrorMemoryAllocation);
  const size_t body = round_up(bytes, kAlign), map_bytes = round_up(body, kPage);
  if (arena_top + map_bytes + 2 * kPage > kArenaBytes)
    not_emulated("more than 1 TiB of allocations in one process");
  char* map = arena + arena_top + kPage;
  arena_top += map_bytes + 2 * kPage;
  mprotect(map, map_bytes, PROT_READ | PROT_WRITE);
  poison(map, map_bytes);
  set_closed(map, map_bytes, protection_key);
  static int number = 0;
  char* base = map + map_bytes - body;
  blocks()[base] = {bytes, map, map_bytes, ++number, false, {}};
  bytes_in_use += bytes;
  *p = base;
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  Lock lock;
  set_up_arena();
  if (p == nullptr) return cudaSuccess;
  if (cudaError_t e = unsafe_call()) return fail(e);
  auto it = blocks().find(static_cast<char*>(p));
  if (it == blocks().end() || it->second.freed) {
    report(std::string("cudaFree of ") +
           (it == blocks().end() ? "an address that is no buffer" : "a freed buffer"));
    return fail(cudaErrorInvalidValue);
  }
  synchronize_all();
  Block& b = it->second;
  b.freed = true;
  bytes_in_use -= b.bytes;
  set_closed(b.map, b.map_bytes, 0);
  madvise(b.map, b.map_bytes, MADV_DONTNEED);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** p, size_t bytes) {
  Lock lock;
  return allocate_pinned(p, bytes, cudaHostAllocDefault);
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags) {
  Lock lock;
  if ((flags & ~unsigned{cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined}) != 0)
    return fail(cudaErrorInvalidValue);
  return allocate_pinned(p, bytes, flags);
}

cudaError_t cudaFreeHost(void* p) {
  Lock lock;
  if (p == nullptr) return cudaSuccess;
  if (cudaError_t e = unsafe_call()) return fail(e);
  auto it = pinned_buffers().find(static_cast<char*>(p));
  if (it == pinned_buffers().end() || it->second.registered) return fail(cudaErrorInvalidValue);
  if (it->second.readers > 0 || it->second.writers > 0)
    report("cudaFreeHost of a pinned buffer while a copy may still use it");
  synchronize_all();
  munmap(it->second.base, it->second.map_bytes);
  pinned_buffers().erase(it);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  Lock lock;
  set_up_arena();
  if (p == nullptr || bytes == 0) return fail(cudaErrorInvalidValue);
  if (cudaError_t e = unsafe_call()) return fail(e);
  auto* base = static_cast<char*>(p);
  if (find_pinned(base) != nullptr) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned_buffers()[base] = {base, bytes, bytes, 0, true, 0, 0};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* p) {
  Lock lock;
  if (cudaError_t e = unsafe_call()) return fail(e);
  auto it = pinned_buffers().find(static_cast<char*>(p));
  if (it == pinned_buffers().end() || !it->second.registered) return fail(cudaErrorHostMemoryNotRegistered);
  if (it->second.readers > 0 || it->second.writers > 0)
    report("cudaHostUnregister of a buffer while a copy may still use it");
  pinned_buffers().erase(it);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Lock lock;
  *total = config().memory;
  *free_bytes = config().memory - bytes_in_use;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  Lock lock;
  *out = {};
  char* base = nullptr;
  const Block* b = is_device(p) ? find_block(p, &base) : nullptr;
  if (b != nullptr && !b->freed) {
    out->type = cudaMemoryTypeDevice;
    out->devicePointer = const_cast<void*>(p);
  } else if (const Pinned* pin = find_pinned(p); pin != nullptr) {
    out->type = cudaMemoryTypeHost;
    out->hostPointer = const_cast<void*>(p);
    out->devicePointer = const_cast<void*>(p);
  } else {
    out->type = cudaMemoryTypeUnregistered;
    out->hostPointer = const_cast<void*>(p);
    out->device = -2;  // cudaInvalidDeviceId
  }
  return cudaSuccess;
}

}  // extern "C"

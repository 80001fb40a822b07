// Configuration, the lock, findings and faults.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/cudaemu/core.h"

namespace cudaemu {
namespace {

std::recursive_mutex lock_mutex;
int lock_depth = 0;  // of the thread that holds the lock

struct Findings {
  std::vector<std::string> list;
  std::set<std::string> seen;
};
Findings& findings() {
  static auto* f = new Findings;  // outlives every static destructor
  return *f;
}
std::string& identity() {
  static auto* text = new std::string;
  return *text;
}

void check_at_exit() {
  if (findings().list.empty()) return;
  std::fflush(nullptr);
  std::fprintf(stderr, "cudaemu: the process ends with %zu findings, see above\n", findings().list.size());
  _exit(kFaultReports);
}

Config read_environment() {
  Config c;
  if (const char* e = std::getenv("CUDAEMU_SEED")) c.seed = std::strtoull(e, nullptr, 10);
  if (const char* e = std::getenv("CUDAEMU_SCHEDULE")) {
    if (std::strcmp(e, "eager") == 0) c.schedule = Schedule::kEager;
    if (std::strcmp(e, "lazy") == 0) c.schedule = Schedule::kLazy;
  }
  if (const char* e = std::getenv("CUDAEMU_DEADLOCK_S")) c.deadlock_s = std::strtod(e, nullptr);
  if (const char* e = std::getenv("CUDAEMU_DEVICES")) c.devices = std::atoi(e);
  if (const char* e = std::getenv("CUDAEMU_MEMORY_MB")) c.memory = std::strtoull(e, nullptr, 10) << 20;
  if (const char* e = std::getenv("CUDAEMU_PKEYS")) c.pkeys = std::atoi(e) != 0;
  return c;
}

std::string prefix() { return identity().empty() ? "cudaemu: " : "cudaemu: " + identity() + ": "; }

}  // namespace

Config& config() {
  static auto* c = [] {
    std::atexit(check_at_exit);
    return new Config(read_environment());
  }();
  return *c;
}

std::mt19937_64& rng() {
  static auto* generator = new std::mt19937_64(config().seed);
  return *generator;
}

void set_identity(const std::string& text) { identity() = text; }

void report(const std::string& text) {
  config();
  if (!findings().seen.insert(text).second) return;
  findings().list.push_back(text);
  std::fprintf(stderr, "%sreport: %s\n", prefix().c_str(), text.c_str());
}

void fault(int code, const std::string& text) {
  std::fflush(nullptr);
  std::fprintf(stderr, "%sfault: %s\n", prefix().c_str(), text.c_str());
  _exit(code);
}

void not_emulated(const std::string& name) {
  std::fflush(nullptr);
  std::fprintf(stderr, "%snot emulated: %s\n", prefix().c_str(), name.c_str());
  std::abort();
}

Lock::Lock() {
  lock_mutex.lock();
  ++lock_depth;
}
Lock::~Lock() {
  --lock_depth;
  lock_mutex.unlock();
}

void sleep_unlocked(int microseconds) {
  const int depth = lock_depth;
  lock_depth = 0;
  for (int i = 0; i < depth; ++i) lock_mutex.unlock();
  usleep(static_cast<useconds_t>(microseconds));
  for (int i = 0; i < depth; ++i) lock_mutex.lock();
  lock_depth = depth;
}

void set_schedule(Schedule schedule, uint64_t seed) {
  Lock lock;
  config().schedule = schedule;
  config().seed = seed;
  rng().seed(seed);
}

void set_deadlock_seconds(double seconds) {
  Lock lock;
  config().deadlock_s = seconds;
}

std::vector<std::string> take_reports() {
  Lock lock;
  std::vector<std::string> out;
  out.swap(findings().list);
  findings().seen.clear();
  return out;
}

}  // namespace cudaemu

// What tests may ask of the emulator beside CUDA itself. The environment sets the same at start:
//   CUDAEMU_SEED=n  CUDAEMU_SCHEDULE=eager|lazy|random  CUDAEMU_DEADLOCK_S=seconds  CUDAEMU_DEVICES=n
//   CUDAEMU_MEMORY_MB=n  CUDAEMU_PKEYS=0 (host traps by mprotect even where protection keys exist)
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cudaemu {

enum class Schedule {
  kEager,  ///< an operation runs as soon as it may
  kLazy,   ///< an operation runs as late as it may: only when something waits for it
  kRandom  ///< seeded mixture
};

/// Exit codes of a process that the emulator ends. A missing feature aborts instead (SIGABRT).
enum Fault : int {
  kFaultPinned = 76,    ///< the host used a pinned buffer while a copy may still use it
  kFaultHost = 77,      ///< the host touched device memory
  kFaultKernel = 78,    ///< a kernel left its buffers: out of bounds, freed, or not declared
  kFaultOther = 79,     ///< any other bad address
  kFaultDeadlock = 81,  ///< nothing can run any more
  kFaultBarrier = 82,   ///< threads of a block wait at barriers that the others never reach
  kFaultReports = 86    ///< the process ended with reports that nobody took
};

/// Schedule and seed for all that follows.
void set_schedule(Schedule schedule, uint64_t seed);
/// Seconds without any progress after which a wait ends the process with kFaultDeadlock.
void set_deadlock_seconds(double seconds);

/// Findings since the last call, each text once, oldest first; the list is empty afterwards. A process that
/// ends with findings that nobody took prints them and exits with kFaultReports.
std::vector<std::string> take_reports();

/// Device bytes in use.
std::uint64_t device_bytes();

}  // namespace cudaemu

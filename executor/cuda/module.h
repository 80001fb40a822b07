// What a device module (libonnx_ddp_cuda.so, libonnx_ddp_cudaemu.so) hands to the program: one table, by one C function.
// The program and its modules share libonnxddp.so and are built together; the build id makes sure of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "distributed/communicator.h"
#include "executor/device.h"
#include "executor/kernel.h"

namespace onnxddp::cuda {

/// Raised with every change of ModuleTable or ModuleEntry.
inline constexpr std::uint32_t kModuleAbi = 1;

#if defined(ONNXDDP_VERSION)
#define ONNXDDP_BUILD_TEXT_(x) #x
#define ONNXDDP_BUILD_TEXT(x) ONNXDDP_BUILD_TEXT_(x)
/// Version, compiler's C++ ABI, and sizes of what crosses the border: "0.1.0 abi 1017 cxx11 1 sizes 152/56/176".
inline std::string module_build_id() {
  return cat(ONNXDDP_VERSION, " abi ", ONNXDDP_BUILD_TEXT(__GXX_ABI_VERSION), " cxx11 ", _GLIBCXX_USE_CXX11_ABI, " sizes ",
             sizeof(PlanContext), "/", sizeof(Kernel), "/", sizeof(CommunicatorOptions));
}
#endif

/// All of it may throw Error, like any C++ function of the program.
struct ModuleTable {
  std::uint32_t abi;
  /// Devices that can be used, or 0 with the reason.
  int (*device_count)(std::string* reason);
  /// `kind`: what Device::kind() is to say. Makes device `index` the one of this process.
  std::unique_ptr<Device> (*make_device)(const std::string& kind, int index);
  /// Kernels that a device of this module runs.
  const KernelTable& (*kernels)();
  /// Collectives on memory of `device`, which is one of this module's. Waits for all ranks; see nccl.h.
  std::unique_ptr<Communicator> (*make_communicator)(Device& device, const CommunicatorOptions& options);
};

/// The module's one export, kModuleEntry: the table, or null with the reason in `error` (ended by 0) if the program has another
/// ABI number or build id. Throws nothing.
using ModuleEntry = const ModuleTable* (*)(std::uint32_t abi, const char* build_id, char* error, std::size_t error_bytes) noexcept;
inline constexpr const char* kModuleEntry = "onnx_ddp_backend";

}  // namespace onnxddp::cuda

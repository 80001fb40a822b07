#include "executor/cuda/module.h"

#include <cstdio>
#include <exception>

#include "executor/cuda/runtime.h"
#include "executor/cuda/kernel_table.h"
#include "executor/cuda/nccl.h"

namespace onnxddp::cuda {
namespace {

std::unique_ptr<Device> make_module_device(const std::string& kind, int index) {
  std::string reason;
  const int count = device_count(&reason);
  if (count == 0) throw usage_error(cat("--device ", kind, ": no device can be used")).at(reason).hint("--device cpu");
  if (index < 0 || index >= count)
    throw usage_error(cat("--device ", kind, ": there is no device ", index, ", only ", count)).hint("CUDA_VISIBLE_DEVICES hides devices");
  return std::make_unique<CudaDevice>(kind, index);
}

std::unique_ptr<Communicator> make_module_communicator(Device& device, const CommunicatorOptions& options) {
  auto* own = dynamic_cast<CudaDevice*>(&device);
  CHECK(own != nullptr, "a communicator of the CUDA module for ", device.name());
  pin_nccl_environment();
  return std::make_unique<NcclCommunicator>(options, own->comm().get());
}

constexpr ModuleTable kTable{kModuleAbi, device_count, make_module_device, cuda_kernels, make_module_communicator};

const ModuleTable* enter(std::uint32_t abi, const char* build_id, char* error, std::size_t error_bytes) {
  if (abi != kModuleAbi) {
    std::snprintf(error, error_bytes, "the module speaks ABI %u, the program %u", kModuleAbi, abi);
    return nullptr;
  }
  const std::string own = module_build_id();
  if (build_id == nullptr || own != build_id) {
    std::snprintf(error, error_bytes, "the module is of build \"%s\", the program of \"%s\"", own.c_str(), build_id == nullptr ? "" : build_id);
    return nullptr;
  }
  return &kTable;
}

}  // namespace
}  // namespace onnxddp::cuda

extern "C" ONNXDDP_API const onnxddp::cuda::ModuleTable* onnx_ddp_backend(std::uint32_t abi, const char* build_id, char* error,
                                                                          std::size_t error_bytes) noexcept {
  try {
    return onnxddp::cuda::enter(abi, build_id, error, error_bytes);
  } catch (const std::exception& e) {
    std::snprintf(error, error_bytes, "%s", e.what());
  } catch (...) {
    std::snprintf(error, error_bytes, "unknown exception");
  }
  return nullptr;
}

// Chooses the device. Back ends other than the CPU are modules that are opened at run time.
#pragma once

#include <memory>
#include <string>

#include "executor/device.h"

namespace ONNXDDP_API onnxddp {

namespace cuda {
struct ModuleTable;
}

/// Throws a usage Error for a device that is not there; cheap, so that it can be asked before anything is
/// read or started.
void check_device(const std::string& kind);
/// `kind`: auto, cpu, cuda or cudaemu. Throws a usage Error for a device that is not there.
std::unique_ptr<Device> make_device(const std::string& kind, int threads);

/// Opens the module of `kind`, cuda or cudaemu, which stays open; the same table each time. It is looked for beside
/// libonnxddp.so, beside the program, then in the folders of ONNX_DDP_BACKEND_PATH (separated by ':'). cuda: only where the
/// NVIDIA driver opens. Throws a usage Error where the driver or the module is missing, or is of another build.
const cuda::ModuleTable& open_module(const std::string& kind);

}  // namespace onnxddp

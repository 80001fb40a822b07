// Chooses the device. Back ends other than the CPU are modules that are opened at run time.
#pragma once

#include <memory>
#include <string>

#include "executor/device.h"

namespace ONNXDDP_API onnxddp {

/// Throws a usage Error for a device that is not there; cheap, so that it can be asked before anything is
/// read or started.
void check_device(const std::string& kind);
/// `kind`: auto, cpu, cuda or cudaemu. Throws a usage Error for a device that is not there.
std::unique_ptr<Device> make_device(const std::string& kind, int threads);

}  // namespace onnxddp

#include "executor/cuda/loader.h"

#include <dlfcn.h>

namespace onnxddp {
namespace {

/// Whether the NVIDIA driver can be opened; says why not in `reason`.
bool has_driver(std::string& reason) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    const char* text = dlerror();
    reason = text != nullptr ? text : "libcuda.so.1 does not open";
    return false;
  }
  dlclose(driver);
  return true;
}

}  // namespace

void check_device(const std::string& kind) {
  if (kind == "cpu" || kind == "auto") return;
  if (kind == "cuda") {
    std::string reason;
    if (!has_driver(reason))
      throw usage_error("--device cuda: there is no NVIDIA driver here")
          .at(reason)
          .hint("--device cpu, or run where nvidia-smi works");
    throw usage_error("--device cuda: this version's CUDA module cannot run whole training steps yet")
        .hint("--device cpu");
  }
  if (kind == "cudaemu")
    throw usage_error(
        "--device cudaemu: this version's emulated CUDA module cannot run whole training steps yet")
        .hint("--device cpu");
  throw usage_error(cat("--device: unknown device '", kind, "'")).hint("auto, cpu, cuda or cudaemu");
}

std::unique_ptr<Device> make_device(const std::string& kind, int threads) {
  check_device(kind);
  return make_cpu_device(threads);
}

}  // namespace onnxddp

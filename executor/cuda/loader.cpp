#include "executor/cuda/loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <vector>

#include "executor/cuda/module.h"

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

namespace fs = std::filesystem;

std::string open_failure() {
  const char* text = dlerror();
  return text != nullptr ? text : "it does not open";
}

/// Opening the module loads hundreds of megabytes of libraries; so the driver is asked for first.
void need_driver() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr)
    throw usage_error("--device cuda: there is no NVIDIA driver here")
        .at(open_failure())
        .hint("--device cpu, or run where nvidia-smi works");
  dlclose(driver);
}

std::vector<fs::path> module_folders() {
  std::vector<fs::path> folders;
  Dl_info library{};
  if (dladdr(reinterpret_cast<const void*>(&open_module), &library) != 0 && library.dli_fname != nullptr)
    folders.push_back(fs::path(library.dli_fname).parent_path());
  std::error_code none;
  const fs::path program = fs::read_symlink("/proc/self/exe", none);
  if (!none) folders.push_back(program.parent_path());
  const char* listed = std::getenv("ONNX_DDP_BACKEND_PATH");
  std::string rest = listed != nullptr ? listed : "";
  while (!rest.empty()) {
    const std::size_t end = rest.find(':');
    if (end != 0) folders.emplace_back(rest.substr(0, end));
    rest = end == std::string::npos ? "" : rest.substr(end + 1);
  }
  return folders;
}

fs::path find_module(const std::string& kind) {
  const std::string name = "libonnx_ddp_" + kind + ".so";
  std::string tried;
  for (const fs::path& folder : module_folders()) {
    std::error_code none;
    if (fs::exists(folder / name, none)) return folder / name;
    tried += (tried.empty() ? "" : ", ") + folder.string();
  }
  throw usage_error(cat("--device ", kind, ": ", name, " is not there"))
      .at("looked in " + tried)
      .hint(kind == "cuda" ? "a build with nvcc makes it; ONNX_DDP_BACKEND_PATH names further folders"
                           : "a build from source makes it (a test tool, never installed); ONNX_DDP_BACKEND_PATH names further folders");
}

const cuda::ModuleTable& load(const std::string& kind) {
  if (kind == "cuda") need_driver();
  const fs::path path = find_module(kind);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw usage_error(cat("--device ", kind, ": the module does not open")).at(open_failure()).hint("the CUDA libraries that it was built with must be found");
  const auto entry = reinterpret_cast<cuda::ModuleEntry>(dlsym(library, cuda::kModuleEntry));
  char reason[512] = "it has no entry";
  const cuda::ModuleTable* table =
      entry != nullptr ? entry(cuda::kModuleAbi, cuda::module_build_id().c_str(), reason, sizeof reason) : nullptr;
  if (table == nullptr)
    throw usage_error(cat("--device ", kind, ": the module does not belong to this program")).at(path.string() + ": " + reason).hint("build or install both together");
  return *table;
}

}  // namespace

const cuda::ModuleTable& open_module(const std::string& kind) {
  static std::mutex mutex;
  static std::map<std::string, const cuda::ModuleTable*> open;
  const std::lock_guard<std::mutex> lock(mutex);
  const cuda::ModuleTable*& table = open[kind];
  if (table == nullptr) table = &load(kind);
  return *table;
}

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

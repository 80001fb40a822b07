// The border between the program and its modules; the emulated one is opened.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>

#include "executor/cuda/loader.h"
#include "executor/cuda/module.h"

namespace onnxddp::cuda {
namespace {

std::string report_of(const std::string& kind) {
  try {
    make_device(kind, 1);
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_code(), kExitUsage);
    return e.report();
  }
  return "";
}

bool driver_is_here() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return false;
  dlclose(driver);
  return true;
}

TEST(Loader, CudaWithoutADriverIsAUsageError) {
  if (driver_is_here()) GTEST_SKIP() << "there is a driver";
  EXPECT_NE(report_of("cuda").find("--device cuda: there is no NVIDIA driver here"), std::string::npos);
  EXPECT_EQ(make_device("auto", 1)->kind(), "cpu");
}

TEST(Loader, TrainingOnTheEmulatorIsRefusedClearly) {
  EXPECT_NE(report_of("cudaemu").find("cannot run whole training steps yet"), std::string::npos);
  EXPECT_NE(report_of("abacus").find("unknown device 'abacus'"), std::string::npos);
}

TEST(Module, TableWorks) {
  const ModuleTable& table = open_module("cudaemu");
  EXPECT_EQ(&table, &open_module("cudaemu"));
  EXPECT_EQ(table.abi, kModuleAbi);
  std::string reason;
  ASSERT_GT(table.device_count(&reason), 0) << reason;
  EXPECT_THROW(table.make_device("cudaemu", 1000), Error);  // crosses the border as what it is
  const std::unique_ptr<Device> device = table.make_device("cudaemu", 0);
  EXPECT_EQ(device->kind(), "cudaemu");
  EXPECT_EQ(&device->kernels(), &table.kernels());
  EXPECT_NE(table.kernels().find("MatMul", DType::f32), nullptr);
  const std::unique_ptr<Communicator> alone = table.make_communicator(*device, {});
  float number = 3;
  void* memory = device->allocate(sizeof number);
  device->upload(memory, &number, sizeof number);
  alone->all_reduce(memory, 1, DType::f32);
  device->download(&number, memory, sizeof number);
  EXPECT_EQ(number, 3);
  device->free(memory);
  const std::unique_ptr<Device> cpu = make_cpu_device(1);
  EXPECT_THROW(table.make_communicator(*cpu, {}), InternalError);
}

TEST(Module, EntryRefusesAnotherBuild) {
  void* library = dlopen(ONNXDDP_BINARY_DIR "/libonnx_ddp_cudaemu.so", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  const auto entry = reinterpret_cast<ModuleEntry>(dlsym(library, kModuleEntry));
  ASSERT_NE(entry, nullptr);
  char error[256] = "";
  EXPECT_EQ(entry(kModuleAbi + 1, module_build_id().c_str(), error, sizeof error), nullptr);
  EXPECT_STREQ(error, "the module speaks ABI 1, the program 2");
  EXPECT_EQ(entry(kModuleAbi, "another", error, sizeof error), nullptr);
  EXPECT_NE(std::strstr(error, "the program of \"another\""), nullptr) << error;
  EXPECT_EQ(entry(kModuleAbi, nullptr, error, 4), nullptr);
  EXPECT_STREQ(error, "the");
  EXPECT_NE(entry(kModuleAbi, module_build_id().c_str(), error, sizeof error), nullptr);
}

}  // namespace
}  // namespace onnxddp::cuda

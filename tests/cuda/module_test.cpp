// The border between the program and its modules; the emulated one is opened.
#include "executor/cuda/module.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "executor/cuda/loader.h"
#include "graph/text.h"

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

TEST(Loader, TheProgramStartsWithin30Milliseconds) {
  if (std::string(ONNXDDP_SANITIZED) != "") GTEST_SKIP() << "sanitizers take longer";
  double least = 1e9;  // others may be busy: the shortest of several starts counts
  for (int i = 0; i < 20 && least > 0.03; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_EQ(std::system(ONNXDDP_BINARY_DIR "/onnx-ddp --version > /dev/null"), 0);
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  EXPECT_LE(least, 0.03);
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

/// Kernels of the module run through its table and its device's lane.
TEST(Module, KernelsRun) {
  const ModuleTable& table = open_module("cudaemu");
  const std::unique_ptr<Device> device = table.make_device("cudaemu", 0);
  const Sample sample = parse_sample("CrossEntropyLoss(f32[2,2], i64[2])");
  const float logits[] = {1, 1, 3, 3};
  const std::int64_t labels[] = {0, 1};
  void* x = device->allocate(sizeof logits);
  void* t = device->allocate(sizeof labels);
  void* y = device->allocate(sizeof(float));
  device->upload(x, logits, sizeof logits);
  device->upload(t, labels, sizeof labels);
  PlanContext c(sample.graph, sample.graph.node(sample.graph.order.at(0)),
                {{DType::f32, {2, 2}}, {DType::i64, {2}}}, {{DType::f32, {}}}, 1);
  device->on_lane(onnxddp::Lane::compute, [&] {
    const onnxddp::Run run = table.kernels().find("CrossEntropyLoss", DType::f32)->prepare(c);
    void* scratch = device->allocate(c.scratch_bytes);
    const void* in[] = {x, t};
    run({in, &y, scratch, nullptr});
    float loss = 0;
    device->download(&loss, y, sizeof loss);
    EXPECT_NEAR(loss, 2 * std::log(2.0), 1e-6);
    device->free(scratch);
  });
  for (void* memory : {x, t, y}) device->free(memory);
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

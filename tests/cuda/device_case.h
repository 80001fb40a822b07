// Fixture of the wrappers' tests: under emulation all schedules, on a device once; skipped without one.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "executor/cuda/runtime.h"
#include "executor/cuda/status.h"
#include "graph/tensor.h"

#if !defined(CUDAEMU_REAL_DEVICE)
#include "tests/cudaemu/control.h"
#endif

namespace onnxddp::cuda {

/// Runs the body of every test in 3 schedules with 5 seeds each and expects no finding of the emulator.
class DeviceTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
#if defined(CUDAEMU_REAL_DEVICE)
    std::string reason;
    if (device_count(&reason) == 0) GTEST_SKIP() << reason;
#else
    cudaemu::set_schedule(static_cast<cudaemu::Schedule>(GetParam() % 3),
                          static_cast<unsigned>(GetParam() / 3 + 1));
#endif
    device_ = std::make_unique<CudaDevice>("cuda", 0);
  }
  void TearDown() override {
    device_.reset();
#if !defined(CUDAEMU_REAL_DEVICE)
    EXPECT_EQ(cudaemu::take_reports(), std::vector<std::string>{});
#endif
  }

  template <class T>
  DeviceMemory on_device(const std::vector<T>& values) {
    DeviceMemory memory(values.size() * sizeof(T));
    device_->upload(memory.get(), values.data(), memory.bytes());
    return memory;
  }
  template <class T>
  std::vector<T> from_device(const DeviceMemory& memory) {
    std::vector<T> values(memory.bytes() / sizeof(T));
    device_->download(values.data(), memory.get(), memory.bytes());
    return values;
  }

  std::unique_ptr<CudaDevice> device_;
};

#if defined(CUDAEMU_REAL_DEVICE)
#define INSTANTIATE_DEVICE_TESTS(suite) INSTANTIATE_TEST_SUITE_P(Device, suite, ::testing::Values(0))
#else
#define INSTANTIATE_DEVICE_TESTS(suite) INSTANTIATE_TEST_SUITE_P(Schedules, suite, ::testing::Range(0, 15))
#endif

inline std::vector<float> random_floats(std::int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& v : out) v = uniform(generator);
  return out;
}

inline void expect_close(const std::vector<float>& actual, const std::vector<float>& expected,
                         double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    ASSERT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::abs(static_cast<double>(expected[i]))))
        << "element " << i;
}

}  // namespace onnxddp::cuda

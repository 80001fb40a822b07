// Fixture of the conformance tests: RAII for CUDA objects, and schedules where the emulator runs them.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#if !defined(CUDAEMU_REAL_DEVICE)
#include "tests/cudaemu/control.h"
#endif

#define CUDA_OK(expression) ASSERT_EQ(expression, cudaSuccess)

namespace cudaemu_test {

/// A schedule and a seed of the emulator; of no meaning on a device.
struct Run {
  int schedule;
  unsigned seed;
};
inline std::ostream& operator<<(std::ostream& out, const Run& run) {
  return out << (run.schedule == 0 ? "eager" : run.schedule == 1 ? "lazy" : "random") << run.seed;
}

inline auto schedules() {
#if defined(CUDAEMU_REAL_DEVICE)
  return ::testing::Values(Run{0, 0});
#else
  std::vector<Run> all;
  for (int schedule = 0; schedule < 3; ++schedule)
    for (unsigned seed = 1; seed <= 5; ++seed) all.push_back({schedule, seed});
  return ::testing::ValuesIn(all);
#endif
}

/// Whether there is a device to run on; the emulator is one.
inline bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// Skips without a device; sets the schedule; expects no findings of the emulator at the end.
class ConformanceTest : public ::testing::TestWithParam<Run> {
 protected:
  void SetUp() override {
#if defined(CUDAEMU_REAL_DEVICE)
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
#else
    cudaemu::set_schedule(static_cast<cudaemu::Schedule>(GetParam().schedule), GetParam().seed);
#endif
  }
  void TearDown() override {
#if !defined(CUDAEMU_REAL_DEVICE)
    EXPECT_EQ(cudaemu::take_reports(), std::vector<std::string>{});
#endif
  }
};

class Stream {
 public:
  // Members of a fixture are made before it can skip: without a device this one stays empty.
  Stream() {
    EXPECT_TRUE(!has_device() || cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~Stream() { EXPECT_TRUE(stream_ == nullptr || cudaStreamDestroy(stream_) == cudaSuccess); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT: implicit

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    EXPECT_EQ(cudaEventCreateWithFlags(&event_, flags), cudaSuccess);
  }
  ~Event() { EXPECT_EQ(cudaEventDestroy(event_), cudaSuccess); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }  // NOLINT: implicit

 private:
  cudaEvent_t event_ = nullptr;
};

/// n elements of device memory.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : size_(static_cast<size_t>(n)) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), size_ * sizeof(T)), cudaSuccess);
  }
  Buffer(const std::vector<T>& values, cudaStream_t stream) : Buffer(static_cast<int64_t>(values.size())) {
    EXPECT_EQ(cudaMemcpyAsync(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice, stream),
              cudaSuccess);
  }
  ~Buffer() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  /// The values after all work of the stream.
  std::vector<T> read(cudaStream_t stream) const {
    std::vector<T> out(size_);
    EXPECT_EQ(cudaMemcpyAsync(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return out;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

/// n elements of pinned host memory.
template <class T>
class Pinned {
 public:
  explicit Pinned(size_t n) {
    EXPECT_EQ(cudaMallocHost(reinterpret_cast<void**>(&data_), n * sizeof(T)), cudaSuccess);
  }
  ~Pinned() { EXPECT_EQ(cudaFreeHost(data_), cudaSuccess); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  T* get() const { return data_; }
  T& operator[](int i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
};

}  // namespace cudaemu_test

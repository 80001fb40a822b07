// What the emulator promises of the CUDA runtime and its kernels, in terms that hold on a real device, too:
// this file and test_kernels.cu build unchanged against the real libraries (scripts/gpu_check.sh).
#include "tests/cudaemu/conformance.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/cudaemu/test_kernels.h"

namespace cudaemu_test {
namespace {

class Conformance : public ConformanceTest {};
INSTANTIATE_TEST_SUITE_P(Schedules, Conformance, schedules());

TEST_P(Conformance, DevicesAndVersions) {
  int count = 0, version = 0, value = 0, device = -1;
  CUDA_OK(cudaGetDeviceCount(&count));
  EXPECT_GE(count, 1);
  CUDA_OK(cudaRuntimeGetVersion(&version));
  EXPECT_GE(version, 12000);
  CUDA_OK(cudaDriverGetVersion(&version));
  EXPECT_GE(version, 12000);
  CUDA_OK(cudaGetDevice(&device));
  EXPECT_EQ(device, 0);
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  EXPECT_EQ(properties.warpSize, 32);
  CUDA_OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  EXPECT_EQ(value, properties.multiProcessorCount);
  EXPECT_EQ(cudaSetDevice(10000), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
  EXPECT_STREQ(cudaGetErrorString(cudaSuccess), "no error");
}

TEST_P(Conformance, AllocationsAreAlignedAndCounted) {
  size_t before = 0, after = 0, total = 0;
  CUDA_OK(cudaMemGetInfo(&before, &total));
  void* p = nullptr;
  CUDA_OK(cudaMalloc(&p, 64 << 20));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 256, 0u);
  CUDA_OK(cudaMemGetInfo(&after, &total));
  EXPECT_LE(after + (64 << 20), before);
  cudaPointerAttributes attributes;
  CUDA_OK(cudaPointerGetAttributes(&attributes, p));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  CUDA_OK(cudaFree(p));
  CUDA_OK(cudaFree(nullptr));
  int local = 0;
  CUDA_OK(cudaPointerGetAttributes(&attributes, &local));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaMalloc(&p, size_t{1} << 50), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

TEST_P(Conformance, CopiesThroughPageableAndPinnedMemory) {
  Stream stream;
  Buffer<float> x(1000), y(1000);
  std::vector<float> in(1000), out(1000, -1.0f);
  std::iota(in.begin(), in.end(), 0.0f);
  CUDA_OK(cudaMemcpyAsync(x.get(), in.data(), 4000, cudaMemcpyHostToDevice, stream));
  std::fill(in.begin(), in.end(), -2.0f);  // pageable memory is free again
  CUDA_OK(cudaMemcpyAsync(y.get(), x.get(), 4000, cudaMemcpyDeviceToDevice, stream));
  CUDA_OK(cudaMemcpyAsync(out.data(), y.get(), 4000, cudaMemcpyDefault, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(out[static_cast<size_t>(i)], static_cast<float>(i));

  Pinned<float> pinned(1000);
  for (int i = 0; i < 1000; ++i) pinned[i] = static_cast<float>(2 * i);
  CUDA_OK(cudaMemcpyAsync(x.get(), pinned.get(), 4000, cudaMemcpyHostToDevice, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  pinned[7] = -1;
  CUDA_OK(cudaMemcpyAsync(pinned.get(), x.get(), 4000, cudaMemcpyDeviceToHost, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[7], 14.0f);
  EXPECT_EQ(pinned[999], 1998.0f);
}

TEST_P(Conformance, RegisteredMemoryCopies) {
  Stream stream;
  Buffer<float> x(1024);
  std::vector<float> host(1024, 3.0f);
  CUDA_OK(cudaHostRegister(host.data(), 4096, cudaHostRegisterDefault));
  CUDA_OK(cudaMemcpyAsync(x.get(), host.data(), 4096, cudaMemcpyHostToDevice, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaHostUnregister(host.data()));
  EXPECT_EQ(x.read(stream), std::vector<float>(1024, 3.0f));
}

TEST_P(Conformance, SynchronousCopyAndFill) {
  Buffer<int> x(16);
  CUDA_OK(cudaMemset(x.get(), 0, 64));
  CUDA_OK(cudaDeviceSynchronize());
  std::vector<int> host(16, 9);
  CUDA_OK(cudaMemcpy(host.data(), x.get(), 64, cudaMemcpyDeviceToHost));
  EXPECT_EQ(host, std::vector<int>(16, 0));
}

TEST_P(Conformance, CopyOfRowsWithPitch) {
  Stream stream;
  Buffer<int> x(5 * 8);
  std::vector<int> in(3 * 5), out(3 * 5, 0);
  std::iota(in.begin(), in.end(), 1);
  CUDA_OK(cudaMemcpy2DAsync(x.get(), 32, in.data(), 12, 12, 5, cudaMemcpyHostToDevice, stream));
  CUDA_OK(cudaMemcpy2DAsync(out.data(), 12, x.get(), 32, 12, 5, cudaMemcpyDeviceToHost, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(in, out);
}

TEST_P(Conformance, GridStrideKernel) {
  Stream stream;
  for (int64_t n : {1, 31, 128, 1000}) {
    Buffer<float> x(n), y(n);
    fill(x.get(), 3.0f, n, stream);
    fill(y.get(), 1.0f, n, stream);
    axpy(2.0f, x.get(), y.get(), n, stream);
    EXPECT_EQ(y.read(stream), std::vector<float>(static_cast<size_t>(n), 7.0f)) << n;
  }
}

TEST_P(Conformance, EmptyGridDoesNothing) {
  Stream stream;
  fill(nullptr, 1.0f, 0, stream);
  CUDA_OK(cudaStreamSynchronize(stream));
}

TEST_P(Conformance, LaunchOfTooManyThreadsIsRefused) {
  Stream stream;
  Buffer<float> x(8), y(8);
  EXPECT_ANY_THROW(reverse_blocks(x.get(), y.get(), 8, 2048, 8192, stream));
  EXPECT_ANY_THROW(reverse_blocks(x.get(), y.get(), 8, 32, 1 << 20, stream));
  (void)cudaGetLastError();
}

TEST_P(Conformance, TransposeThroughSharedMemory) {
  Stream stream;
  const int rows = 45, cols = 70;
  std::vector<float> in(static_cast<size_t>(rows * cols));
  std::iota(in.begin(), in.end(), 0.0f);
  Buffer<float> x(in, stream), y(rows * cols);
  transpose(x.get(), y.get(), rows, cols, stream);
  const auto out = y.read(stream);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c)
      ASSERT_EQ(out[static_cast<size_t>(c * rows + r)], in[static_cast<size_t>(r * cols + c)])
          << r << "," << c;
}

TEST_P(Conformance, BlockReductions) {
  Stream stream;
  for (int threads : {32, 64, 96, 256, 1024}) {
    std::vector<float> in(517);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50);
    float even = 0, odd = 0;
    for (size_t i = 0; i < in.size(); ++i) (i % 2 == 0 ? even : odd) += in[i];
    Buffer<float> x(in, stream), out(5);
    reductions(x.get(), out.get(), 517, threads, stream);
    EXPECT_EQ(out.read(stream), (std::vector<float>{even + odd, 50, -50, even, odd})) << threads;
  }
}

TEST_P(Conformance, WarpFunctions) {
  Stream stream;
  const int n = 64;
  Buffer<int> out(11 * n);
  warp_functions(out.get(), n, stream);
  const auto got = out.read(stream);
  for (int t = 0; t < n; ++t) {
    const int lane = t % 32, warp = t - lane, segment = t - t % 8;
    unsigned ballot = 0;
    for (int i = 0; i < 32; i += 3) ballot |= 1u << i;
    const int expected[11] = {t ^ 5,
                              lane + 3 < 32 ? t + 3 : t,
                              lane >= 3 ? t - 3 : t,
                              warp + 7,
                              segment + 2,
                              t % 8 + 3 < 8 ? t + 3 : t,
                              static_cast<int>(ballot),
                              1,
                              0,
                              lane < 16 ? t ^ 1 : -1,
                              1};
    for (int row = 0; row < 11; ++row)
      EXPECT_EQ(row == 7 || row == 8 ? got[static_cast<size_t>(row * n + t)] != 0
                                     : got[static_cast<size_t>(row * n + t)],
                expected[row])
          << "row " << row << " thread " << t;
  }
}

TEST_P(Conformance, BarrierVotes) {
  Stream stream;
  for (int ones : {0, 5, 96}) {
    std::vector<int> in(96, 0);
    std::fill(in.begin(), in.begin() + ones, 1);
    Buffer<int> x(in, stream), out(3);
    votes(x.get(), out.get(), 96, stream);
    EXPECT_EQ(out.read(stream), (std::vector<int>{ones == 96, ones > 0, ones}));
  }
}

TEST_P(Conformance, SharedAndGlobalAtomics) {
  Stream stream;
  std::vector<int> in(1000), expected(16, 0);
  for (size_t i = 0; i < in.size(); ++i)
    ++expected[static_cast<size_t>(in[i] = static_cast<int>(i * i % 13))];
  Buffer<int> x(in, stream), bins(std::vector<int>(16, 0), stream);
  histogram(x.get(), bins.get(), 1000, stream);
  EXPECT_EQ(bins.read(stream), expected);
  Buffer<int> cell(std::vector<int>{10}, stream), out(8);
  atomics(cell.get(), out.get(), stream);
  EXPECT_EQ(out.read(stream), (std::vector<int>{10, 15, 100, 7, 20, 21, 21, 85}));
}

TEST_P(Conformance, DynamicSharedMemoryUpToTheOptInLimit) {
  Stream stream;
  std::vector<float> in(100);
  std::iota(in.begin(), in.end(), 0.0f);
  Buffer<float> x(in, stream), y(100);
  for (size_t bytes : {size_t{64 * 4}, size_t{200 << 10}}) {
    reverse_blocks(x.get(), y.get(), 100, 64, bytes, stream);
    const auto out = y.read(stream);
    EXPECT_EQ(out[0], 63.0f);
    EXPECT_EQ(out[64], 99.0f);
  }
}

TEST_P(Conformance, VectorAccessesAndBf16) {
  Stream stream;
  std::vector<float> in(128);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i) * 1.001f;
  Buffer<float> x(in, stream), y(128), z(128);
  copy_vec(x.get(), y.get(), 128, stream);
  EXPECT_EQ(y.read(stream), in);
  round_bf16(x.get(), z.get(), 128, stream);
  const auto rounded = z.read(stream);
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_NEAR(rounded[i], in[i], std::abs(in[i]) / 256);
    uint32_t bits;
    std::memcpy(&bits, &rounded[i], 4);
    EXPECT_EQ(bits & 0xFFFFu, 0u);
  }
}

TEST_P(Conformance, ThreeDimensionalGrid) {
  Stream stream;
  Buffer<int> out(std::vector<int>(7, 0), stream);
  grid_shape(out.get(), 3, 2, 5, stream);
  EXPECT_EQ(out.read(stream), (std::vector<int>{2, 1, 4, 3, 2, 5, 30}));
}

TEST_P(Conformance, EventsOrderStreams) {
  Stream a, b;
  Event ready, done;
  const int64_t n = 256;
  Buffer<float> x(n), y(n);
  for (int round = 0; round < 4; ++round) {
    fill(x.get(), static_cast<float>(round), n, a);
    fill(y.get(), 1.0f, n, b);
    CUDA_OK(cudaEventRecord(ready, a));
    CUDA_OK(cudaStreamWaitEvent(b, ready, 0));
    axpy(1.0f, x.get(), y.get(), n, b);
    CUDA_OK(cudaEventRecord(done, b));
    CUDA_OK(cudaStreamWaitEvent(a, done, 0));  // the next round overwrites x
  }
  CUDA_OK(cudaEventSynchronize(done));
  EXPECT_EQ(cudaEventQuery(done), cudaSuccess);
  EXPECT_EQ(y.read(b), std::vector<float>(256, 4.0f));
}

TEST_P(Conformance, EventsTellTimeAndQueriesFinish) {
  Stream stream;
  Event start(cudaEventDefault), end(cudaEventDefault);
  Buffer<float> x(4096);
  EXPECT_EQ(cudaEventQuery(start), cudaSuccess);  // never recorded
  CUDA_OK(cudaEventRecord(start, stream));
  fill(x.get(), 1.0f, 4096, stream);
  CUDA_OK(cudaEventRecord(end, stream));
  while (cudaEventQuery(end) == cudaErrorNotReady) std::this_thread::yield();
  while (cudaStreamQuery(stream) == cudaErrorNotReady) std::this_thread::yield();
  float ms = -1;
  CUDA_OK(cudaEventElapsedTime(&ms, start, end));
  EXPECT_GE(ms, 0.0f);
  Event untimed;
  CUDA_OK(cudaEventRecord(untimed, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  EXPECT_NE(cudaEventElapsedTime(&ms, start, untimed), cudaSuccess);
  (void)cudaGetLastError();
}

TEST_P(Conformance, PrioritiesExist) {
  int least = 1, greatest = 1;
  CUDA_OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  EXPECT_LE(greatest, least);
  cudaStream_t stream = nullptr;
  CUDA_OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  CUDA_OK(cudaStreamDestroy(stream));
}

TEST_P(Conformance, HostFunctionsRunInOrder) {
  Stream stream;
  Buffer<float> x(64);
  Pinned<float> out(64);
  std::atomic<float> seen{0};
  struct Job {
    Pinned<float>* out;
    std::atomic<float>* seen;
  } job{&out, &seen};
  fill(x.get(), 5.0f, 64, stream);
  CUDA_OK(cudaMemcpyAsync(out.get(), x.get(), 256, cudaMemcpyDeviceToHost, stream));
  CUDA_OK(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        auto* j = static_cast<Job*>(data);
        j->seen->store((*j->out)[63]);
      },
      &job));
  CUDA_OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(seen.load(), 5.0f);
}

// Fork to `b`, join, replay three times.
TEST_P(Conformance, CapturedForkAndJoinReplays) {
  Stream a, b;
  Event fork, join;
  const int64_t n = 300;
  Buffer<float> x(std::vector<float>(300, 1.0f), a), y(std::vector<float>(300, 0.0f), a), z(300);
  CUDA_OK(cudaStreamSynchronize(a));
  cudaGraph_t graph = nullptr;
  cudaStreamCaptureStatus status;
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(cudaStreamIsCapturing(a, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  axpy(1.0f, x.get(), y.get(), n, a);  // y += x
  CUDA_OK(cudaEventRecord(fork, a));
  CUDA_OK(cudaStreamWaitEvent(b, fork, 0));
  CUDA_OK(cudaMemcpyAsync(z.get(), y.get(), 1200, cudaMemcpyDeviceToDevice, b));  // z = y
  CUDA_OK(cudaMemsetAsync(x.get(), 0, 4, a));                                     // x[0] = 0
  CUDA_OK(cudaEventRecord(join, b));
  CUDA_OK(cudaStreamWaitEvent(a, join, 0));
  axpy(1.0f, x.get(), z.get(), n, a);  // z += x
  CUDA_OK(cudaStreamEndCapture(a, &graph));
  CUDA_OK(cudaStreamIsCapturing(b, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_EQ(y.read(a), std::vector<float>(300, 0.0f));  // captured work has not run
  cudaGraphExec_t exec = nullptr;
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_OK(cudaGraphDestroy(graph));
  for (int i = 0; i < 3; ++i) CUDA_OK(cudaGraphLaunch(exec, a));
  const auto out = z.read(a), ys = y.read(a);
  EXPECT_EQ(ys[0], 1.0f);
  EXPECT_EQ(ys[299], 3.0f);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[299], 4.0f);
  CUDA_OK(cudaGraphExecDestroy(exec));
}

TEST_P(Conformance, CaptureInfoNamesTheCapture) {
  Stream a;
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  Buffer<float> x(8);
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(cudaStreamGetCaptureInfo(a, &status, &id, nullptr, nullptr, nullptr, nullptr));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_NE(id, 0u);
  CUDA_OK(cudaMemsetAsync(x.get(), 0, 32, a));
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(a, &graph));
  CUDA_OK(cudaGraphDestroy(graph));
}

TEST_P(Conformance, UnjoinedCaptureIsAnError) {
  Stream a, b;
  Event fork;
  Buffer<float> x(8);
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(cudaEventRecord(fork, a));
  CUDA_OK(cudaStreamWaitEvent(b, fork, 0));
  fill(x.get(), 1.0f, 8, b);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
  (void)cudaGetLastError();
}

TEST_P(Conformance, WaitForUncapturedWorkIsAnError) {
  Stream a, b;
  Event event;
  CUDA_OK(cudaEventRecord(event, b));
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaStreamWaitEvent(a, event, 0), cudaErrorStreamCaptureIsolation);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  (void)cudaGetLastError();
}

TEST_P(Conformance, UnsafeCallsSpoilACaptureOfTheSameThreadOnly) {
  Stream a;
  Buffer<float> x(8);
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(cudaMemsetAsync(x.get(), 0, 32, a));
  std::thread([] {
    void* p = nullptr;
    CUDA_OK(cudaMalloc(&p, 16));
    CUDA_OK(cudaFree(p));
  }).join();
  CUDA_OK(cudaStreamEndCapture(a, &graph));
  CUDA_OK(cudaGraphDestroy(graph));

  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  (void)cudaGetLastError();

  auto mode = cudaStreamCaptureModeRelaxed;
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(cudaThreadExchangeStreamCaptureMode(&mode));
  void* p = nullptr;
  CUDA_OK(cudaMalloc(&p, 16));
  CUDA_OK(cudaThreadExchangeStreamCaptureMode(&mode));
  CUDA_OK(cudaMemsetAsync(p, 0, 16, a));
  CUDA_OK(cudaStreamEndCapture(a, &graph));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaFree(p));
}

// A pinned buffer that is read by every replay.
TEST_P(Conformance, ReplaySeesNewPinnedValues) {
  Stream a;
  Pinned<float> lr(1);
  Buffer<float> x(1), y(std::vector<float>{0.0f}, a);
  CUDA_OK(cudaStreamSynchronize(a));
  lr[0] = 0;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  CUDA_OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CUDA_OK(cudaMemcpyAsync(x.get(), lr.get(), 4, cudaMemcpyHostToDevice, a));
  axpy(1.0f, x.get(), y.get(), 1, a);
  CUDA_OK(cudaStreamEndCapture(a, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 1; i <= 4; ++i) {
    lr[0] = static_cast<float>(i);
    CUDA_OK(cudaGraphLaunch(exec, a));
    CUDA_OK(cudaStreamSynchronize(a));
  }
  EXPECT_EQ(y.read(a), std::vector<float>{10.0f});
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace cudaemu_test

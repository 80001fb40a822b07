// Planted faults: each is found in every schedule and with every seed. What only one process does; the faults
// between ranks are in nccl_test.cpp.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/cudaemu/control.h"
#include "tests/cudaemu/processes.h"
#include "tests/cudaemu/test_kernels.h"

namespace cudaemu_test {
namespace {

using ::testing::HasSubstr;

void ok(cudaError_t error) { require(error == cudaSuccess, cudaGetErrorString(error)); }

cudaStream_t make_stream() {
  cudaStream_t s;
  ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  return s;
}
cudaEvent_t make_event() {
  cudaEvent_t e;
  ok(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  return e;
}
float* make_buffer(int64_t n) {
  void* p;
  ok(cudaMalloc(&p, static_cast<size_t>(n) * 4));
  return static_cast<float*>(p);
}
float* make_pinned(int64_t n) {
  void* p;
  ok(cudaMallocHost(&p, static_cast<size_t>(n) * 4));
  return static_cast<float*>(p);
}
void sync(cudaStream_t s) { ok(cudaStreamSynchronize(s)); }
std::vector<float> read(const float* p, int64_t n, cudaStream_t s) {
  std::vector<float> out(static_cast<size_t>(n));
  ok(cudaMemcpyAsync(out.data(), p, out.size() * 4, cudaMemcpyDeviceToHost, s));
  sync(s);
  return out;
}

// Runs the body in 3 schedules x 5 seeds, each in a process of its own, and expects the exit code and the
// message.
void expect_found(int exit_code, const std::string& message, const std::function<void()>& body) {
  for (int schedule = 0; schedule < 3; ++schedule)
    for (unsigned seed = 1; seed <= 5; ++seed) {
      const Outcome out = run_process([&] {
        cudaemu::set_schedule(static_cast<cudaemu::Schedule>(schedule), seed);
        cudaemu::set_deadlock_seconds(0.2);
        body();
      });
      EXPECT_EQ(out.exit_code, exit_code) << "schedule " << schedule << " seed " << seed << "\n"
                                          << out.errors;
      EXPECT_THAT(out.errors, HasSubstr(message)) << "schedule " << schedule << " seed " << seed;
    }
}

TEST(Faults, CorrectProgramIsClean) {
  expect_found(0, "", [] {
    auto a = make_stream(), b = make_stream();
    auto e = make_event();
    float *x = make_buffer(300), *y = make_buffer(300);
    fill(x, 1, 300, a);
    fill(y, 1, 300, a);
    ok(cudaEventRecord(e, a));
    ok(cudaStreamWaitEvent(b, e, 0));
    axpy(2, x, y, 300, b);
    require(read(y, 300, b)[299] == 3, "wrong result");
    ok(cudaFree(x));
  });
}

TEST(Faults, MissingWait) {
  expect_found(cudaemu::kFaultReports, "race: kernel axpy reads what kernel fill writes on another stream",
               [] {
                 auto a = make_stream(), b = make_stream();
                 float *x = make_buffer(300), *y = make_buffer(300);
                 fill(y, 1, 300, b);
                 fill(x, 1, 300, a);
                 axpy(2, x, y, 300, b);
                 sync(b);
               });
}

TEST(Faults, OverwrittenWhileAnotherStreamReads) {
  expect_found(cudaemu::kFaultReports, "race: kernel fill writes what kernel axpy reads on another stream",
               [] {
                 auto a = make_stream(), b = make_stream();
                 float *x = make_buffer(300), *y = make_buffer(300);
                 fill(x, 1, 300, a);
                 fill(y, 1, 300, a);
                 sync(a);
                 axpy(2, x, y, 300, b);
                 fill(x, 5, 300, a);
                 sync(a);
                 sync(b);
               });
}

TEST(Faults, EventRecordedTooEarly) {
  expect_found(cudaemu::kFaultReports, "race: kernel axpy reads what kernel fill writes on another stream",
               [] {
                 auto a = make_stream(), b = make_stream();
                 auto e = make_event();
                 float *x = make_buffer(300), *y = make_buffer(300);
                 fill(y, 1, 300, b);
                 ok(cudaEventRecord(e, a));
                 fill(x, 1, 300, a);
                 ok(cudaStreamWaitEvent(b, e, 0));
                 axpy(2, x, y, 300, b);
                 sync(b);
               });
}

TEST(Faults, SharedCublasWorkspace) {
  expect_found(
      cudaemu::kFaultReports, "race: gemm 2x2x2 writes what gemm 2x2x2 writes on another stream", [] {
        auto a = make_stream(), b = make_stream();
        float *x = make_buffer(4), *y = make_buffer(8), *workspace = make_buffer(1024);
        fill(x, 1, 4, a);
        sync(a);
        int i = 0;
        for (cudaStream_t s : {a, b}) {
          cublasHandle_t handle;
          cublasCreate(&handle);
          cublasSetStream(handle, s);
          cublasSetWorkspace(handle, workspace, 4096);
          const float one = 1, zero = 0;
          cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, x, CUDA_R_32F, 2, x, CUDA_R_32F, 2,
                       &zero, y + 4 * i++, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        }
        ok(cudaDeviceSynchronize());
      });
}

TEST(Faults, MissingJoinInCapture) {
  expect_found(1, "capturing stream has unjoined work", [] {
    auto a = make_stream(), b = make_stream();
    auto e = make_event();
    float* x = make_buffer(64);
    ok(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    ok(cudaEventRecord(e, a));
    ok(cudaStreamWaitEvent(b, e, 0));
    fill(x, 1, 64, b);
    cudaGraph_t graph;
    ok(cudaStreamEndCapture(a, &graph));
  });
}

// The join is there, but too late for its reader: replay is checked as any other work.
TEST(Faults, LateJoinInCapture) {
  expect_found(cudaemu::kFaultReports, "race: kernel axpy reads what kernel fill writes on another stream",
               [] {
                 auto a = make_stream(), b = make_stream();
                 auto fork = make_event(), join = make_event();
                 float *x = make_buffer(64), *y = make_buffer(64);
                 fill(y, 1, 64, a);
                 sync(a);
                 ok(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
                 ok(cudaEventRecord(fork, a));
                 ok(cudaStreamWaitEvent(b, fork, 0));
                 fill(x, 1, 64, b);
                 ok(cudaEventRecord(join, b));
                 axpy(1, x, y, 64, a);
                 ok(cudaStreamWaitEvent(a, join, 0));
                 cudaGraph_t graph;
                 cudaGraphExec_t exec;
                 ok(cudaStreamEndCapture(a, &graph));
                 ok(cudaGraphInstantiate(&exec, graph, 0));
                 ok(cudaGraphLaunch(exec, a));
                 sync(a);
               });
}

TEST(Faults, UninitialisedRead) {
  expect_found(cudaemu::kFaultReports,
               "kernel bug_reads_uninitialised: uninitialised read of 400 bytes from buffer 1", [] {
                 auto a = make_stream();
                 float *x = make_buffer(100), *y = make_buffer(100);
                 fill(y, 1, 100, a);
                 bug_reads_uninitialised(x, y, 100, a);
                 sync(a);
               });
}

TEST(Faults, PartialWriteReachesTheHost) {
  expect_found(cudaemu::kFaultReports, "uninitialised value reaches the host, from byte 396 of buffer 1", [] {
    auto a = make_stream();
    float* y = make_buffer(100);
    bug_partial_write(y, 100, a);
    read(y, 100, a);
  });
}

TEST(Faults, PartialWriteReachesTheHostThroughAKernel) {
  expect_found(cudaemu::kFaultReports, "uninitialised value reaches the host, from byte 396 of buffer 2", [] {
    auto a = make_stream();
    float *x = make_buffer(100), *y = make_buffer(100);
    bug_partial_write(x, 100, a);
    fill(y, 1, 100, a);
    axpy(2, x, y, 100, a);
    read(y, 100, a);
  });
}

TEST(Faults, OutOfBounds) {
  expect_found(cudaemu::kFaultKernel, "kernel bug_out_of_bounds: out of bounds at", [] {
    auto a = make_stream();
    float* y = make_buffer(100);
    bug_out_of_bounds(y, 100, a);
    sync(a);
  });
}

TEST(Faults, OutOfBoundsByOne) {
  expect_found(cudaemu::kFaultReports,
               "kernel bug_out_of_bounds_by_one: out of bounds, wrote outside buffer 1", [] {
                 auto a = make_stream();
                 float* y = make_buffer(100);
                 bug_out_of_bounds_by_one(y, 100, a);
                 sync(a);
               });
}

TEST(Faults, CopyOutOfBounds) {
  expect_found(cudaemu::kFaultReports,
               "copy to device: out of bounds, touches 128 bytes from buffer 1 (100 bytes)", [] {
                 auto a = make_stream();
                 void* p;
                 ok(cudaMalloc(&p, 100));
                 std::vector<char> host(128);
                 ok(cudaMemcpyAsync(p, host.data(), 128, cudaMemcpyHostToDevice, a));
                 sync(a);
               });
}

TEST(Faults, UseAfterFree) {
  expect_found(cudaemu::kFaultKernel, "kernel fill: use after free at", [] {
    auto a = make_stream();
    float* y = make_buffer(100);
    ok(cudaFree(y));
    fill(y, 1, 100, a);
    sync(a);
  });
}

TEST(Faults, DoubleFree) {
  expect_found(cudaemu::kFaultReports, "cudaFree of a freed buffer", [] {
    float* y = make_buffer(100);
    ok(cudaFree(y));
    require(cudaFree(y) == cudaErrorInvalidValue, "accepted");
  });
}

TEST(Faults, HostReadsDeviceMemory) {
  expect_found(cudaemu::kFaultHost, "the host touches device memory", [] {
    auto a = make_stream();
    float* y = make_buffer(100);
    fill(y, 1, 100, a);
    sync(a);
    require(y[0] == 1, "read");
  });
}

TEST(Faults, HostWritesDeviceMemoryFromAnotherThread) {
  expect_found(cudaemu::kFaultHost, "the host touches device memory", [] {
    float* y = make_buffer(100);
    std::thread([y] { y[3] = 1; }).join();
  });
}

TEST(Faults, HostPointerInAKernel) {
  expect_found(cudaemu::kFaultReports, "kernel axpy: host pointer as an argument", [] {
    auto a = make_stream();
    float* y = make_buffer(4);
    fill(y, 1, 4, a);
    const std::vector<float> x(4, 1.0f);
    axpy(1, x.data(), y, 4, a);
    sync(a);
  });
}

TEST(Faults, PinnedBufferWrittenInFlight) {
  expect_found(cudaemu::kFaultPinned, "the host uses a pinned buffer while a copy may still use it", [] {
    auto a = make_stream();
    float *y = make_buffer(100), *host = make_pinned(100);
    for (int i = 0; i < 100; ++i) host[i] = 1;
    ok(cudaMemcpyAsync(y, host, 400, cudaMemcpyHostToDevice, a));
    host[5] = 2;
  });
}

TEST(Faults, PinnedBufferReadInFlight) {
  expect_found(cudaemu::kFaultPinned, "the host uses a pinned buffer while a copy may still use it", [] {
    auto a = make_stream();
    float *y = make_buffer(100), *host = make_pinned(100);
    fill(y, 1, 100, a);
    ok(cudaMemcpyAsync(host, y, 400, cudaMemcpyDeviceToHost, a));
    require(host[5] == 1, "read");
  });
}

TEST(Faults, PinnedBufferOfAReplayWrittenInFlight) {
  expect_found(cudaemu::kFaultPinned, "the host uses a pinned buffer while a copy may still use it", [] {
    auto a = make_stream();
    float *y = make_buffer(100), *host = make_pinned(100);
    ok(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    ok(cudaMemcpyAsync(y, host, 400, cudaMemcpyHostToDevice, a));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ok(cudaStreamEndCapture(a, &graph));
    ok(cudaGraphInstantiate(&exec, graph, 0));
    host[5] = 1;  // fine: nothing in flight
    ok(cudaGraphLaunch(exec, a));
    host[5] = 2;
  });
}

TEST(Faults, PinnedBufferFreedInFlight) {
  expect_found(cudaemu::kFaultReports, "cudaFreeHost of a pinned buffer while a copy may still use it", [] {
    auto a = make_stream();
    float *y = make_buffer(100), *host = make_pinned(100);
    ok(cudaMemcpyAsync(y, host, 400, cudaMemcpyHostToDevice, a));
    ok(cudaFreeHost(host));
  });
}

TEST(Faults, MissingBarrier) {
  expect_found(cudaemu::kFaultReports, "kernel bug_missing_barrier: a thread ", [] {
    auto a = make_stream();
    float *x = make_buffer(128), *y = make_buffer(128);
    fill(x, 1, 128, a);
    bug_missing_barrier(x, y, a);
    sync(a);
  });
}

TEST(Faults, MissingSecondBarrier) {
  expect_found(cudaemu::kFaultReports, "kernel bug_missing_second_barrier: a thread ", [] {
    auto a = make_stream();
    float *x = make_buffer(128), *y = make_buffer(128);
    fill(x, 1, 128, a);
    bug_missing_second_barrier(x, y, a);
    sync(a);
  });
}

TEST(Faults, UnwrittenSharedMemory) {
  expect_found(cudaemu::kFaultReports, "reads shared memory that no thread of the block wrote", [] {
    auto a = make_stream();
    bug_unwritten_shared(make_buffer(64), a);
    sync(a);
  });
}

TEST(Faults, SharedMemoryOutOfBounds) {
  expect_found(cudaemu::kFaultReports, "indexes dynamic shared memory out of bounds", [] {
    auto a = make_stream();
    bug_shared_out_of_bounds(make_buffer(64), a);
    sync(a);
  });
}

TEST(Faults, DivergentBarrier) {
  expect_found(cudaemu::kFaultReports, "kernel bug_divergent_barrier: barrier in divergent code", [] {
    auto a = make_stream();
    bug_divergent_barrier(make_buffer(64), a);
    sync(a);
  });
}

TEST(Faults, StuckBarrier) {
  expect_found(cudaemu::kFaultBarrier, "kernel bug_stuck_barrier: barrier divergence, nobody can go on", [] {
    auto a = make_stream();
    bug_stuck_barrier(make_buffer(64), a);
    sync(a);
  });
}

TEST(Faults, UndeclaredBuffer) {
  expect_found(cudaemu::kFaultKernel, "kernel bug_undeclared: undeclared buffer at", [] {
    auto a = make_stream();
    bug_undeclared(make_buffer(64), make_buffer(64), a);
    sync(a);
  });
}

TEST(Faults, MisalignedVectorAccess) {
  expect_found(cudaemu::kFaultKernel, "kernel copy_vec: misaligned access of 16 bytes", [] {
    auto a = make_stream();
    float *x = make_buffer(65), *y = make_buffer(64);
    fill(x, 1, 65, a);
    copy_vec(x + 1, y, 64, a);
    sync(a);
  });
}

TEST(Faults, DestroyedStream) {
  expect_found(cudaemu::kFaultReports, "copy on a destroyed stream", [] {
    auto a = make_stream();
    float* y = make_buffer(4);
    ok(cudaStreamDestroy(a));
    const float x[4] = {};
    require(cudaMemcpyAsync(y, x, 16, cudaMemcpyHostToDevice, a) == cudaErrorInvalidResourceHandle,
            "accepted");
  });
}

/// Destroying a stream orders nothing, whatever the next one is called; waiting for the device does.
TEST(Faults, WorkOfADestroyedStream) {
  const auto body = [](bool wait) {
    auto a = make_stream();
    float *x = make_buffer(300), *y = make_buffer(300);
    fill(x, 1, 300, a);
    fill(y, 1, 300, a);
    sync(a);
    fill(x, 2, 300, a);
    ok(cudaStreamDestroy(a));
    if (wait) ok(cudaDeviceSynchronize());
    auto b = make_stream();
    axpy(2, x, y, 300, b);
    require(read(y, 300, b)[299] == 5, "wrong result");
  };
  expect_found(0, "", [&] { body(true); });
  expect_found(cudaemu::kFaultReports, "race: kernel axpy reads what kernel fill writes on another stream",
               [&] { body(false); });
}

TEST(Faults, CudaCallInAHostFunction) {
  expect_found(cudaemu::kFaultReports, "inside a host function", [] {
    static cudaStream_t a = make_stream();
    ok(cudaLaunchHostFunc(
        a, [](void*) { (void)cudaStreamQuery(a); }, nullptr));
    sync(a);
  });
}

// Documented: from pageable memory, cudaMemcpy may return before the device has the data.
TEST(Faults, SynchronousCopyIsNoBarrierForOtherStreams) {
  expect_found(cudaemu::kFaultReports, "race: kernel axpy reads what copy to device writes on another stream",
               [] {
                 auto a = make_stream();
                 float *x = make_buffer(4), *y = make_buffer(4);
                 const std::vector<float> host(4, 1.0f);
                 fill(y, 1, 4, a);
                 ok(cudaMemcpy(x, host.data(), 16, cudaMemcpyHostToDevice));
                 axpy(1, x, y, 4, a);
                 sync(a);
               });
}

void expect_not_emulated(const std::string& name, const std::function<void()>& body) {
  const Outcome out = run_process(body);
  EXPECT_EQ(out.signal, SIGABRT) << out.errors;
  EXPECT_THAT(out.errors, HasSubstr("not emulated: " + name));
}

TEST(Faults, WhatIsNotEmulatedAborts) {
  expect_not_emulated("the default stream (memset)",
                      [] { (void)cudaMemsetAsync(make_buffer(4), 0, 16, nullptr); });
  expect_not_emulated("streams that synchronise with the default stream", [] {
    cudaStream_t s;
    (void)cudaStreamCreateWithFlags(&s, cudaStreamDefault);
  });
  expect_not_emulated("cudaStreamCreate", [] {
    cudaStream_t s;
    (void)cudaStreamCreate(&s);
  });
  expect_not_emulated("cudaMallocAsync", [] {
    void* p;
    (void)cudaMallocAsync(&p, 4, make_stream());
  });
  expect_not_emulated("two devices in one process", [] {
    ok(cudaSetDevice(0));
    (void)cudaSetDevice(1);
  });
}

// The trap by mprotect, where protection keys exist.
TEST(Faults, HostTrapWithoutProtectionKeys) {
  setenv("CUDAEMU_PKEYS", "0", 1);
  const Outcome out = run_process([] {
    auto a = make_stream();
    float* y = make_buffer(100);
    fill(y, 1, 100, a);
    require(read(y, 100, a)[99] == 1, "wrong result");
    y[0] = 2;
  });
  unsetenv("CUDAEMU_PKEYS");
  EXPECT_EQ(out.exit_code, cudaemu::kFaultHost) << out.errors;
}

// A process that ends with findings does not end well.
TEST(Faults, FindingsSpoilTheExitCode) {
  const Outcome out = run_process([] {
    float* y = make_buffer(4);
    ok(cudaFree(y));
    (void)cudaFree(y);
    std::exit(0);
  });
  EXPECT_EQ(out.exit_code, cudaemu::kFaultReports);
  EXPECT_THAT(out.errors, HasSubstr("the process ends with 1 findings"));
}

TEST(Faults, EnvironmentSetsTheSchedule) {
  setenv("CUDAEMU_SCHEDULE", "lazy", 1);
  setenv("CUDAEMU_DEVICES", "0", 1);
  const Outcome none = run_process([] {
    int count = -1;
    require(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0, "device");
  });
  unsetenv("CUDAEMU_DEVICES");
  EXPECT_EQ(none.exit_code, 0) << none.errors;
  setenv("CUDAEMU_MEMORY_MB", "1", 1);
  const Outcome lazy = run_process([] {
    void* p;
    require(cudaMalloc(&p, 2 << 20) == cudaErrorMemoryAllocation, "memory");
    static bool ran = false;
    auto a = make_stream();
    ok(cudaLaunchHostFunc(
        a, [](void*) { ran = true; }, nullptr));
    require(!ran, "not lazy");
    sync(a);
    require(ran, "never ran");
  });
  unsetenv("CUDAEMU_MEMORY_MB");
  unsetenv("CUDAEMU_SCHEDULE");
  EXPECT_EQ(lazy.exit_code, 0) << lazy.errors;
}

// An operation that waits for an event whose record never comes cannot exist; a host that waits for a full
// queue of a lazy stream can: here everything moves, and nothing is stuck.
TEST(Faults, LongQueuesDrain) {
  expect_found(0, "", [] {
    auto a = make_stream(), b = make_stream();
    auto e = make_event();
    float* x = make_buffer(8);
    for (int i = 0; i < 50; ++i) {
      cudaStream_t s = i % 2 == 0 ? a : b, other = i % 2 == 0 ? b : a;
      fill(x, static_cast<float>(i), 8, s);
      ok(cudaEventRecord(e, s));
      ok(cudaStreamWaitEvent(other, e, 0));
    }
    require(read(x, 8, a)[0] == 49, "order");
  });
}

}  // namespace
}  // namespace cudaemu_test

// NCCL between processes: bitwise equal results in any schedule, captured or not; the faults that need
// several ranks.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "tests/cudaemu/control.h"
#include "tests/cudaemu/processes.h"
#include "tests/cudaemu/test_kernels.h"

namespace cudaemu_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void ok(cudaError_t error) { require(error == cudaSuccess, cudaGetErrorString(error)); }
void ok(ncclResult_t result) { require(result == ncclSuccess, ncclGetErrorString(result)); }

ncclUniqueId make_id() {
  ncclUniqueId id;
  ok(ncclGetUniqueId(&id));
  return id;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What a rank contributes at place i of round `round`; sums of these in another order differ in the last
// bits.
float value(int rank, int64_t i, int round) {
  return std::sin(static_cast<float>(i * 7 + rank * 131 + round * 17)) *
         std::pow(10.0f, static_cast<float>(rank % 4));
}

constexpr int64_t kCount = 301;

// Device buffers and streams of one rank.
struct Rank {
  Rank(int r, int n, const ncclUniqueId& id) : rank(r), size(n) {
    ok(cudaSetDevice(rank));
    ok(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    ok(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking));
    ok(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    ok(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    ok(ncclCommInitRank(&comm, size, id, rank));
    in = buffer(kCount * size);
    sum = buffer(kCount);
    scaled = buffer(kCount);
    gathered = buffer(kCount * size);
    scattered = buffer(kCount);
    sent = buffer(kCount);
    total = buffer(kCount);
  }
  ~Rank() { (void)ncclCommDestroy(comm); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  static float* buffer(int64_t n) {
    void* p = nullptr;
    ok(cudaMalloc(&p, static_cast<size_t>(n) * 4));
    return static_cast<float*>(p);
  }

  void upload(int round) {
    std::vector<float> host(static_cast<size_t>(kCount * size));
    for (size_t i = 0; i < host.size(); ++i) host[i] = value(rank, static_cast<int64_t>(i), round);
    ok(cudaMemcpyAsync(in, host.data(), host.size() * 4, cudaMemcpyHostToDevice, compute));
    ok(cudaStreamSynchronize(compute));
  }

  // Every collective on the communication stream, between a kernel before and a kernel behind.
  void step() {
    fill(total, 1.0f, kCount, compute);
    ok(cudaEventRecord(ready, compute));
    ok(cudaStreamWaitEvent(comm_stream, ready, 0));
    ok(ncclAllReduce(in, sum, kCount, ncclFloat32, ncclSum, comm, comm_stream));
    ok(ncclGroupStart());
    ok(ncclAllReduce(in, scaled, kCount, ncclFloat32, factor, comm, comm_stream));
    ok(ncclAllGather(in, gathered, kCount, ncclFloat32, comm, comm_stream));
    ok(ncclGroupEnd());
    ok(ncclReduceScatter(in, scattered, kCount, ncclFloat32, ncclMax, comm, comm_stream));
    ok(ncclBroadcast(in, sent, kCount, ncclFloat32, size - 1, comm, comm_stream));
    ok(cudaEventRecord(done, comm_stream));
    ok(cudaStreamWaitEvent(compute, done, 0));
    axpy(1.0f, sum, total, kCount, compute);
  }

  std::vector<float> read(const float* p, int64_t n) const {
    std::vector<float> out(static_cast<size_t>(n));
    ok(cudaMemcpyAsync(out.data(), p, out.size() * 4, cudaMemcpyDeviceToHost, compute));
    ok(cudaStreamSynchronize(compute));
    return out;
  }

  void check(int round) const {
    const auto s = read(sum, kCount), p = read(scaled, kCount), g = read(gathered, kCount * size);
    const auto m = read(scattered, kCount), b = read(sent, kCount), t = read(total, kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      const auto k = static_cast<size_t>(i);
      float expected = 0, product = 0, high = -INFINITY;
      for (int r = 0; r < size; ++r) {
        expected = r == 0 ? value(r, i, round) : expected + value(r, i, round);
        product = r == 0 ? value(r, i, round) * 0.25f : product + value(r, i, round) * 0.25f;
        high = std::max(high, value(r, rank * kCount + i, round));
        require(g[static_cast<size_t>(r * kCount + i)] == value(r, i, round), "all-gather");
      }
      require(s[k] == expected, "all-reduce");
      require(p[k] == product, "all-reduce with a factor");
      require(m[k] == high, "reduce-scatter");
      require(b[k] == value(size - 1, i, round), "broadcast");
      require(t[k] == 1.0f + expected, "order of the streams");
    }
  }

  int rank, size;
  cudaStream_t compute = nullptr, comm_stream = nullptr;
  cudaEvent_t ready = nullptr, done = nullptr;
  ncclComm_t comm = nullptr;
  ncclRedOp_t factor = ncclSum;
  float *in, *sum, *scaled, *gathered, *scattered, *sent, *total;
};

void create_factor(Rank& me) {
  float quarter = 0.25f;
  ok(ncclRedOpCreatePreMulSum(&me.factor, &quarter, ncclFloat32, ncclScalarHostImmediate, me.comm));
}

void run_seeds(int rank, int size, const ncclUniqueId& id, bool captured, unsigned seeds) {
  Rank me(rank, size, id);
  create_factor(me);
  cudaGraphExec_t exec = nullptr;
  if (captured) {
    cudaGraph_t graph;
    ok(cudaStreamBeginCapture(me.compute, cudaStreamCaptureModeThreadLocal));
    me.step();
    ok(cudaStreamEndCapture(me.compute, &graph));
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphDestroy(graph));
  }
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    cudaemu::set_schedule(static_cast<cudaemu::Schedule>((seed + static_cast<unsigned>(rank)) % 3),
                          seed * 16 + static_cast<unsigned>(rank));
    const int round = static_cast<int>(seed % 5);
    me.upload(round);
    if (captured)
      ok(cudaGraphLaunch(exec, me.compute));
    else
      me.step();
    me.check(round);
  }
  if (captured) ok(cudaGraphExecDestroy(exec));
  ok(ncclRedOpDestroy(me.factor, me.comm));
}

void expect_all_well(const std::vector<Outcome>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_EQ(outcomes[r].exit_code, 0) << "rank " << r << "\n" << outcomes[r].errors;
}

class Nccl : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Nccl, ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Bool()));

TEST_P(Nccl, HundredSeedsAreBitwiseEqual) {
  const auto [size, captured] = GetParam();
  const ncclUniqueId id = make_id();
  expect_all_well(run_processes(
      size, [&, n = size, c = captured](int rank) { run_seeds(rank, n, id, c, 100); }, 100));
}

// bf16 sums in float and rounds once; average; integers; in place; more than one chunk.
TEST(NcclTypes, Bf16AverageIntegersInPlaceAndChunks) {
  const ncclUniqueId id = make_id();
  expect_all_well(run_processes(2, [&](int rank) {
    Rank me(rank, 2, id);
    const int64_t n = 600000;  // float32: three chunks
    std::vector<float> host(static_cast<size_t>(n), static_cast<float>(rank + 1));
    float* x = Rank::buffer(n);
    ok(cudaMemcpyAsync(x, host.data(), host.size() * 4, cudaMemcpyHostToDevice, me.compute));
    ok(ncclAllReduce(x, x, static_cast<size_t>(n), ncclFloat32, ncclAvg, me.comm, me.compute));
    require(me.read(x, n) == std::vector<float>(static_cast<size_t>(n), 1.5f), "average in place");

    std::vector<__nv_bfloat16> half(8, __float2bfloat16(rank == 0 ? 256.0f : 1.0f));  // 257 is no bf16
    ok(cudaMemcpyAsync(x, half.data(), 16, cudaMemcpyHostToDevice, me.compute));
    ok(ncclAllReduce(x, x, 8, ncclBfloat16, ncclSum, me.comm, me.compute));
    ok(cudaMemcpyAsync(half.data(), x, 16, cudaMemcpyDeviceToHost, me.compute));
    require(__bfloat162float(half[7]) == 256.0f, "bf16");

    std::vector<int32_t> ints = {rank, 7 - rank};
    ok(cudaMemcpyAsync(x, ints.data(), 8, cudaMemcpyHostToDevice, me.compute));
    ok(ncclAllReduce(x, x, 2, ncclInt32, ncclMin, me.comm, me.compute));
    ok(cudaMemcpyAsync(ints.data(), x, 8, cudaMemcpyDeviceToHost, me.compute));
    require(ints == std::vector<int32_t>{0, 6}, "min of integers");

    float* both = Rank::buffer(2);
    fill(both + rank, static_cast<float>(10 + rank), 1, me.compute);
    ok(ncclAllGather(both + rank, both, 1, ncclFloat32, me.comm, me.compute));
    require(me.read(both, 2) == std::vector<float>{10, 11}, "gather in place");
    ok(ncclReduceScatter(both, both + rank, 1, ncclFloat32, ncclSum, me.comm, me.compute));
    require(me.read(both + rank, 1) == std::vector<float>{rank == 0 ? 20.0f : 22.0f}, "scatter in place");
  }));
}

// A factor in device memory is read when the collective runs.
TEST(NcclTypes, DeviceFactorAndEmptyCollective) {
  const ncclUniqueId id = make_id();
  expect_all_well(run_processes(2, [&](int rank) {
    Rank me(rank, 2, id);
    float* f = Rank::buffer(1);
    ok(ncclRedOpCreatePreMulSum(&me.factor, f, ncclFloat32, ncclScalarDevice, me.comm));
    fill(f, 0.5f, 1, me.compute);
    fill(me.sum, 3.0f, kCount, me.compute);
    ok(ncclAllReduce(me.sum, me.sum, 0, ncclFloat32, ncclSum, me.comm, me.compute));
    ok(ncclAllReduce(me.sum, me.sum, kCount, ncclFloat32, me.factor, me.comm, me.compute));
    require(me.read(me.sum, kCount)[kCount - 1] == 3.0f, "factor");
    ok(ncclRedOpDestroy(me.factor, me.comm));
    require(ncclAllReduce(me.sum, me.sum, kCount, ncclFloat32, me.factor, me.comm, me.compute) ==
                ncclInvalidArgument,
            "destroyed operation");
  }));
}

// Polls as a program with non-blocking communicators must; the deadline is the caller's. By reference: the
// call that gives `result` may be what makes `comm`.
void settle(const ncclComm_t& comm, ncclResult_t result) {
  const auto start = std::chrono::steady_clock::now();
  while (result == ncclInProgress) {
    ok(ncclCommGetAsyncError(comm, &result));
    require(seconds_since(start) < 20, "still in progress");
    std::this_thread::yield();
  }
  ok(result);
}

TEST(NcclLife, NonBlockingInitFinalizeRegisterSplitShrink) {
  for (int schedule = 0; schedule < 3; ++schedule) {
    const ncclUniqueId id = make_id();
    expect_all_well(run_processes(3, [&](int rank) {
      cudaemu::set_schedule(static_cast<cudaemu::Schedule>(schedule), static_cast<uint64_t>(rank));
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      ncclComm_t comm = nullptr, half = nullptr, rest = nullptr;
      usleep(static_cast<useconds_t>(rank * 3000));
      settle(comm, ncclCommInitRankConfig(&comm, 3, id, rank, &config));
      int count = 0, self = -1;
      ok(ncclCommCount(comm, &count));
      ok(ncclCommUserRank(comm, &self));
      require(count == 3 && self == rank, "size and rank");
      cudaStream_t stream;
      ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      void *p = nullptr, *registration = nullptr;
      ok(ncclMemAlloc(&p, 400));
      auto* x = static_cast<float*>(p);
      ok(ncclCommRegister(comm, p, 400, &registration));
      fill(x, 1, 100, stream);
      for (int i = 0; i < 4; ++i) settle(comm, ncclAllReduce(x, x, 100, ncclFloat32, ncclSum, comm, stream));
      settle(comm, ncclCommSplit(comm, rank == 1 ? NCCL_SPLIT_NOCOLOR : 5, -rank, &half, nullptr));
      if (rank != 1) {
        settle(half, ncclInProgress);
        ok(ncclCommUserRank(half, &self));
        require(self == (rank == 2 ? 0 : 1), "split orders by key");
        settle(half, ncclAllReduce(x, x, 100, ncclFloat32, ncclSum, half, stream));
        settle(half, ncclCommFinalize(half));
        ok(ncclCommDestroy(half));
      }
      ok(cudaStreamSynchronize(stream));
      if (rank != 2) {
        int gone = 2;
        settle(rest, ncclCommShrink(comm, &gone, 1, &rest, nullptr, NCCL_SHRINK_DEFAULT));
        settle(rest, ncclInProgress);
        ok(ncclCommCount(rest, &count));
        require(count == 2, "shrunk");
        settle(rest, ncclAllReduce(x, x, 100, ncclFloat32, ncclMax, rest, stream));
        ok(cudaStreamSynchronize(stream));
        ok(ncclCommDestroy(rest));
      }
      ok(ncclCommDeregister(comm, registration));
      settle(comm, ncclCommFinalize(comm));
      ok(ncclCommDestroy(comm));
      float first = 0;
      ok(cudaMemcpyAsync(&first, x, 4, cudaMemcpyDeviceToHost, stream));
      require(first == 162.0f, "values");
      ok(ncclMemFree(p));
    }));
  }
}

TEST(NcclLife, BadCallsAreRefused) {
  const ncclUniqueId id = make_id();
  expect_all_well(run_processes(1, [&](int) {
    ncclComm_t comm = nullptr, second = nullptr;
    ok(ncclCommInitRank(&comm, 1, id, 0));
    require(ncclCommInitRank(&second, 1, id, 0) == ncclInvalidUsage, "two ranks on one device");
    require(ncclCommInitRank(&second, 2, id, 2) == ncclInvalidArgument, "rank out of range");
    ncclConfig_t broken = NCCL_CONFIG_INITIALIZER;
    broken.magic = 1;
    require(ncclCommInitRankConfig(&second, 1, id, 0, &broken) == ncclInvalidArgument, "configuration");
    require(ncclGroupEnd() == ncclInvalidUsage, "group end");
    cudaStream_t stream;
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    require(ncclBroadcast(nullptr, nullptr, 1, ncclFloat32, 0, comm, stream) == ncclInvalidArgument, "null");
    int version = 0;
    ok(ncclGetVersion(&version));
    require(version == NCCL_VERSION_CODE, "version");
    require(std::string(ncclGetErrorString(ncclRemoteError)) != "", "text");
    require(std::string(ncclGetLastError(comm)).empty(), "last error");
    ok(ncclCommFinalize(comm));
    ok(ncclCommDestroy(comm));
  }));
}

// --- faults; each in 3 schedules x 5 seeds ---

void set_run(int schedule, unsigned seed, double deadlock_s) {
  cudaemu::set_schedule(static_cast<cudaemu::Schedule>(schedule), seed);
  cudaemu::set_deadlock_seconds(deadlock_s);
}

void for_all_runs(const std::function<void(int, unsigned)>& body) {
  for (int schedule = 0; schedule < 3; ++schedule)
    for (unsigned seed = 1; seed <= 5; ++seed) body(schedule, seed);
}

void expect_mismatch(const std::function<void(Rank&)>& body, const std::string& first,
                     const std::string& second) {
  for_all_runs([&](int schedule, unsigned seed) {
    const ncclUniqueId id = make_id();
    const auto outcomes = run_processes(2, [&](int rank) {
      set_run(schedule, seed + static_cast<unsigned>(rank), 10);
      Rank me(rank, 2, id);
      me.upload(0);
      body(me);
      ok(cudaStreamSynchronize(me.comm_stream));
      ncclResult_t error = ncclSuccess;
      ok(ncclCommGetAsyncError(me.comm, &error));
      require(error == ncclInvalidUsage, "no asynchronous error");
      require(std::string(ncclGetLastError(me.comm)).find("collective mismatch") == 0, "last error");
      ok(ncclCommAbort(me.comm));
      me.comm = nullptr;
    });
    for (size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(outcomes[r].exit_code, cudaemu::kFaultReports) << outcomes[r].errors;
      EXPECT_THAT(outcomes[r].errors,
                  AllOf(HasSubstr("report: collective mismatch: rank " + std::to_string(r)), HasSubstr(first),
                        HasSubstr(second)));
    }
  });
}

TEST(NcclFaults, CountMismatch) {
  expect_mismatch(
      [](Rank& me) {
        ok(ncclAllReduce(me.in, me.sum, static_cast<size_t>(kCount - me.rank), ncclFloat32, ncclSum, me.comm,
                         me.comm_stream));
      },
      "ncclAllReduce(301 float32, sum) on stream 2", "ncclAllReduce(300 float32, sum) on stream 2");
}

TEST(NcclFaults, OrderMismatch) {
  expect_mismatch(
      [](Rank& me) {
        const size_t counts[2] = {100, 200};
        for (int i = 0; i < 2; ++i)  // the second may already be refused
          (void)ncclAllReduce(me.in, me.sum, counts[i ^ me.rank], ncclFloat32, ncclSum, me.comm,
                              me.comm_stream);
      },
      "collective 1, ncclAllReduce(100 float32, sum)", "collective 1, ncclAllReduce(200 float32, sum)");
}

TEST(NcclFaults, KindMismatch) {
  expect_mismatch(
      [](Rank& me) {
        if (me.rank == 0)
          ok(ncclAllReduce(me.in, me.sum, 100, ncclFloat32, ncclSum, me.comm, me.comm_stream));
        else
          ok(ncclBroadcast(me.in, me.sum, 100, ncclFloat32, 0, me.comm, me.comm_stream));
      },
      "ncclAllReduce(100 float32, sum)", "ncclBroadcast(100 float32, root 0)");
}

TEST(NcclFaults, CapturedOnOneRankOnly) {
  expect_mismatch(
      [](Rank& me) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        if (me.rank == 0) ok(cudaStreamBeginCapture(me.comm_stream, cudaStreamCaptureModeThreadLocal));
        ok(ncclAllReduce(me.in, me.sum, 100, ncclFloat32, ncclSum, me.comm, me.comm_stream));
        if (me.rank != 0) return;
        ok(cudaStreamEndCapture(me.comm_stream, &graph));
        ok(cudaGraphInstantiate(&exec, graph, 0));
        ok(cudaGraphDestroy(graph));
        ok(cudaGraphLaunch(exec, me.comm_stream));
      },
      "ncclAllReduce(100 float32, sum, captured)", "ncclAllReduce(100 float32, sum) on stream 2");
}

// Rank 1 dies while the others wait in a collective: they hear of it at once, abort, and go on to their end.
TEST(NcclFaults, DeadRankIsAnErrorWithinTheDeadline) {
  for_all_runs([&](int schedule, unsigned seed) {
    const ncclUniqueId id = make_id();
    const auto outcomes = run_processes(3, [&](int rank) {
      set_run(schedule, seed + static_cast<unsigned>(rank), 10);
      Rank me(rank, 3, id);
      me.upload(0);
      ok(ncclAllReduce(me.in, me.sum, kCount, ncclFloat32, ncclSum, me.comm, me.comm_stream));
      ok(cudaStreamSynchronize(me.comm_stream));
      if (rank == 1) raise(SIGKILL);
      ok(ncclAllReduce(me.in, me.sum, kCount, ncclFloat32, ncclSum, me.comm, me.comm_stream));
      const auto start = std::chrono::steady_clock::now();
      std::thread watchdog([&] {
        ncclResult_t error = ncclSuccess;
        while (error == ncclSuccess) {
          usleep(1000);
          ok(ncclCommGetAsyncError(me.comm, &error));
        }
        require(error == ncclRemoteError, "another error");
        ok(ncclCommAbort(me.comm));
      });
      ok(cudaStreamSynchronize(me.comm_stream));
      watchdog.join();
      me.comm = nullptr;
      require(seconds_since(start) < 3, "too late");
    });
    EXPECT_EQ(outcomes[1].signal, SIGKILL);
    for (size_t r : {0u, 2u}) {
      EXPECT_EQ(outcomes[r].exit_code, 0) << outcomes[r].errors;
      EXPECT_THAT(outcomes[r].errors, HasSubstr("has died"));
    }
  });
}

// Nobody aborts: the emulator's limit ends the wait and names rank, stream and operation.
TEST(NcclFaults, DeadlockNamesRankStreamAndOperation) {
  for_all_runs([&](int schedule, unsigned seed) {
    const ncclUniqueId id = make_id();
    const auto outcomes = run_processes(2, [&](int rank) {
      Rank me(rank, 2, id);
      set_run(schedule, seed, 0.1);
      me.upload(0);
      if (rank == 0) ok(ncclAllReduce(me.in, me.sum, kCount, ncclFloat32, ncclSum, me.comm, me.comm_stream));
      ok(cudaStreamSynchronize(me.comm_stream));
    });
    EXPECT_EQ(outcomes[0].exit_code, cudaemu::kFaultDeadlock) << outcomes[0].errors;
    EXPECT_THAT(
        outcomes[0].errors,
        AllOf(HasSubstr("rank 0 of 2: fault: deadlock"), HasSubstr("stream 2 is stuck at ncclAllReduce"),
              HasSubstr("collective 1, ncclAllReduce(301 float32, sum) on stream 2; waits for rank 1")));
  });
}

TEST(NcclFaults, MissingWaitBeforeAllReduce) {
  for_all_runs([&](int schedule, unsigned seed) {
    const ncclUniqueId id = make_id();
    const auto outcomes = run_processes(2, [&](int rank) {
      set_run(schedule, seed + static_cast<unsigned>(rank), 10);
      Rank me(rank, 2, id);
      fill(me.sum, 1.0f, kCount, me.compute);
      ok(ncclAllReduce(me.sum, me.sum, kCount, ncclFloat32, ncclSum, me.comm, me.comm_stream));
      ok(cudaDeviceSynchronize());
    });
    for (const Outcome& out : outcomes) {
      EXPECT_EQ(out.exit_code, cudaemu::kFaultReports) << out.errors;
      EXPECT_THAT(out.errors,
                  HasSubstr("race: ncclAllReduce reads what kernel fill writes on another stream"));
    }
  });
}

TEST(NcclFaults, CommunicatorDestroyedBeforeItsGraph) {
  const ncclUniqueId id = make_id();
  const Outcome out = run_process([&] {
    Rank me(0, 1, id);
    me.upload(0);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ok(cudaStreamBeginCapture(me.compute, cudaStreamCaptureModeThreadLocal));
    ok(ncclAllReduce(me.in, me.sum, kCount, ncclFloat32, ncclSum, me.comm, me.compute));
    ok(cudaStreamEndCapture(me.compute, &graph));
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(ncclCommDestroy(me.comm));
    me.comm = nullptr;
  });
  EXPECT_EQ(out.exit_code, cudaemu::kFaultReports);
  EXPECT_THAT(out.errors, HasSubstr("executable graphs with collectives of this communicator are alive"));
}

TEST(NcclFaults, HostBufferAndOverlap) {
  const ncclUniqueId id = make_id();
  const Outcome out = run_process([&] {
    Rank me(0, 1, id);
    me.upload(0);
    std::vector<float> host(4);
    require(ncclAllReduce(host.data(), me.sum, 4, ncclFloat32, ncclSum, me.comm, me.compute) ==
                ncclInvalidArgument,
            "host");
    require(
        ncclAllReduce(me.in, me.in + 1, 4, ncclFloat32, ncclSum, me.comm, me.compute) == ncclInvalidArgument,
        "overlap");
  });
  EXPECT_EQ(out.exit_code, cudaemu::kFaultReports);
  EXPECT_THAT(out.errors,
              AllOf(HasSubstr("host pointer as a buffer"), HasSubstr("overlap, and not in place")));
}

TEST(NcclFaults, CallOnABusyCommunicator) {
  const ncclUniqueId id = make_id();
  const Outcome out = run_process([&] {
    set_run(1, 1, 10);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    cudaStream_t stream;
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    settle(comm, ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    float* x = Rank::buffer(4);
    fill(x, 1, 4, stream);
    for (int i = 0; i < 20; ++i) (void)ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, comm, stream);
    ok(ncclCommAbort(comm));
  });
  EXPECT_EQ(out.exit_code, cudaemu::kFaultReports) << out.errors;
  EXPECT_THAT(out.errors, HasSubstr("a call on it is still in progress"));
}

TEST(NcclFaults, RanksDisagreeAboutTheirNumber) {
  const ncclUniqueId id = make_id();
  const auto outcomes = run_processes(2, [&](int rank) {
    set_run(2, 1, 1.5);
    usleep(static_cast<useconds_t>(rank * 50000));
    ncclComm_t comm = nullptr;
    ok(ncclCommInitRank(&comm, 2 + rank, id, rank));
  });
  EXPECT_EQ(outcomes[0].exit_code, cudaemu::kFaultDeadlock) << outcomes[0].errors;
  EXPECT_THAT(outcomes[0].errors, HasSubstr("ncclCommInitRank waits for rank 1"));
  EXPECT_EQ(outcomes[1].exit_code, 1) << outcomes[1].errors;
  EXPECT_THAT(outcomes[1].errors, HasSubstr("rank 1 says 3 ranks, another said 2"));
}

}  // namespace
}  // namespace cudaemu_test

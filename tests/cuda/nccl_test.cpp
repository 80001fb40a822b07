// The NCCL communicator between processes, under emulation.
#include "executor/cuda/nccl.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "distributed/store.h"
#include "executor/cuda/status.h"
#include "tests/cuda/training_case.h"
#include "tests/cudaemu/control.h"
#include "tests/cudaemu/processes.h"

namespace onnxddp::cuda {
namespace {

using cudaemu_test::Outcome;
using cudaemu_test::require;
using cudaemu_test::run_processes;

constexpr std::int64_t kCount = 301;

float value(int rank, std::int64_t i) {
  return static_cast<float>(rank + 1) * 0.1f + static_cast<float>(i) * 0.37f;
}

/// One process's part: device, store, communicator.
struct Rank {
  Rank(int r, int n, std::uint16_t port, std::chrono::milliseconds timeout = std::chrono::seconds(30))
      : device("cudaemu", r),
        store(n > 1 ? connect_store("127.0.0.1", port, "secret", std::chrono::seconds(10)) : nullptr) {
    options.rank = r;
    options.size = n;
    options.store = store.get();
    options.timeout = timeout;
    communicator = std::make_unique<NcclCommunicator>(options, device.comm().get());
  }
  DeviceMemory upload(const std::vector<float>& values) {
    DeviceMemory memory(values.size() * 4);
    device.upload(memory.get(), values.data(), memory.bytes());
    return memory;
  }
  std::vector<float> download(const DeviceMemory& memory) {
    std::vector<float> values(memory.bytes() / 4);
    device.download(values.data(), memory.get(), memory.bytes());
    return values;
  }
  CudaDevice device;
  std::unique_ptr<Store> store;
  CommunicatorOptions options;
  std::unique_ptr<NcclCommunicator> communicator;
};

void all_collectives(Rank& r) {
  const int n = r.options.size, me = r.options.rank;
  std::vector<float> mine(kCount * n), sum(kCount);
  for (std::int64_t i = 0; i < kCount * n; ++i) mine[static_cast<std::size_t>(i)] = value(me, i);
  for (std::int64_t i = 0; i < kCount; ++i)
    for (int k = 0; k < n; ++k)
      sum[static_cast<std::size_t>(i)] =
          k == 0 ? value(0, i) : sum[static_cast<std::size_t>(i)] + value(k, i);

  DeviceMemory a = r.upload({mine.begin(), mine.begin() + kCount});
  r.communicator->all_reduce(a.get(), kCount, DType::f32);
  require(r.download(a) == sum, "all-reduce");

  DeviceMemory b = r.upload({mine.begin(), mine.begin() + kCount}), gathered(kCount * 4 * n);
  r.communicator->all_gather(b.get(), kCount * 4, gathered.get());
  const std::vector<float> all = r.download(gathered);
  for (int k = 0; k < n; ++k)
    for (std::int64_t i = 0; i < kCount; ++i)
      require(all[static_cast<std::size_t>(k * kCount + i)] == value(k, i), "all-gather");

  DeviceMemory c = r.upload(mine), block(kCount * 4);
  r.communicator->reduce_scatter(c.get(), kCount, DType::f32, block.get());
  const std::vector<float> scattered = r.download(block);
  for (std::int64_t i = 0; i < kCount; ++i) {
    float expected = value(0, me * kCount + i);
    for (int k = 1; k < n; ++k) expected += value(k, me * kCount + i);
    require(scattered[static_cast<std::size_t>(i)] == expected, "reduce-scatter");
  }

  r.communicator->broadcast(b.get(), kCount * 4, n - 1);
  require(r.download(b)[7] == value(n - 1, 7), "broadcast");
  r.communicator->barrier();
}

void captured(Rank& r) {
  DeviceMemory a = r.upload({1, 2, 3});
  const cudaStream_t stream = r.device.comm().get();
  const WorkGraph graph =
      WorkGraph::capture(stream, [&] { r.communicator->queue_all_reduce(a.get(), 3, DType::f32, stream); });
  for (int replay = 0; replay < 2; ++replay) graph.launch(stream);
  r.communicator->wait(stream);
  const auto n = static_cast<float>(r.options.size * r.options.size);
  require(r.download(a) == std::vector<float>({n, 2 * n, 3 * n}), "captured all-reduce");
}

void expect_all_well(const std::vector<Outcome>& outcomes) {
  for (const Outcome& o : outcomes) EXPECT_EQ(o.exit_code, 0) << o.errors;
}

TEST(NcclCommunicator, CollectivesOfTwoAndThreeProcesses) {
  for (const int n : {1, 2, 3}) {
    for (int schedule = 0; schedule < 3; ++schedule) {
      StoreServer server("127.0.0.1", 0, "secret");
      expect_all_well(run_processes(n, [&](int rank) {
        cudaemu::set_schedule(static_cast<cudaemu::Schedule>(schedule), static_cast<unsigned>(rank + 1));
        Rank r(rank, n, server.port());
        all_collectives(r);
        captured(r);
      }));
    }
  }
}

/// The table's AllReduce of two operands that lie side by side in whole cache lines, or apart.
void reduce_by_the_table(Rank& r) {
  DeviceMemory memory(256);
  std::vector<float> values(64, 0.0f);
  values[0] = 1, values[1] = 2, values[16] = 3, values[48] = 4;
  r.device.upload(memory.get(), values.data(), memory.bytes());
  const auto at = [&](int i) { return memory.as<float>() + i; };
  const Graph graph;
  Node node;
  node.op = default_registry().find("AllReduce");
  r.device.on_lane(onnxddp::Lane::comm, [&] {
    for (const int second : {16, 48}) {
      PlanContext c(graph, node, {{DType::f32, {2}}, {DType::f32, {1}}},
                    {{DType::f32, {2}}, {DType::f32, {1}}}, 1);
      void* places[] = {at(0), at(second)};
      r.device.kernels()
          .find("AllReduce", DType::f32)
          ->prepare(c)({places, places, nullptr, r.communicator.get()});
    }
    r.communicator->wait(r.device.comm().get());
  });
  const auto n = static_cast<float>(r.options.size);
  const std::vector<float> sums = r.download(memory);
  require(sums[0] == n * n && sums[1] == 2 * n * n && sums[16] == 3 * n && sums[48] == 4 * n,
          "all-reduce of the table");
}

TEST(NcclCommunicator, TableQueuesCollectives) {
  StoreServer server("127.0.0.1", 0, "secret");
  expect_all_well(run_processes(2, [&](int rank) {
    Rank r(rank, 2, server.port());
    reduce_by_the_table(r);
  }));
}

/// Data-parallel steps with synchronised batch norm: on two devices as on two ranks of the CPU.
TEST(NcclCommunicator, TwoRanksTrainAsOnTheCpu) {
  const OptimizerSpec optimizer{"adam", {}};
  std::vector<States> expected(2);
  run_ranks(2, [&](Communicator& communicator) {
    const std::unique_ptr<Device> cpu = make_cpu_device(1);
    expected[static_cast<std::size_t>(communicator.rank())] = train(*cpu, communicator, optimizer);
  });
  StoreServer server("127.0.0.1", 0, "secret");
  expect_all_well(run_processes(2, [&](int rank) {
    Rank r(rank, 2, server.port());
    const double difference = worst_difference(train(r.device, *r.communicator, optimizer),
                                               expected[static_cast<std::size_t>(rank)]);
    require(difference <= 1e-5, cat("states differ by ", difference));
  }));
}

template <class F>
std::string peer_error(const F& body) {
  try {
    body();
  } catch (const PeerError& e) {
    return e.what();
  }
  throw std::runtime_error("no PeerError");
}

TEST(NcclCommunicator, ADeadPeerIsAnErrorWithinTheDeadline) {
  StoreServer server("127.0.0.1", 0, "secret");
  const auto outcomes = run_processes(2, [&](int rank) {
    Rank r(rank, 2, server.port(), std::chrono::seconds(20));
    r.communicator->barrier();
    if (rank == 1) raise(SIGKILL);
    DeviceMemory a = r.upload({1, 2, 3});
    const std::string first = peer_error([&] { r.communicator->all_reduce(a.get(), 3, DType::f32); });
    require(first.find("rank 0 of 2: all-reduce of 3 f32") != std::string::npos, first);
    require(peer_error([&] { r.communicator->barrier(); }) == first, "every later call says the same");
    (void)cudaemu::take_reports();
  });
  EXPECT_EQ(outcomes[0].exit_code, 0) << outcomes[0].errors;
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
}

TEST(NcclCommunicator, ALatePeerIsAnErrorAtTheDeadline) {
  StoreServer server("127.0.0.1", 0, "secret");
  const auto outcomes = run_processes(2, [&](int rank) {
    Rank r(rank, 2, server.port(), std::chrono::milliseconds(rank == 0 ? 500 : 20000));
    r.communicator->barrier();
    if (rank == 0) {
      const std::string text = peer_error([&] { r.communicator->barrier(); });
      require(text.find("500 ms") != std::string::npos, text);
      r.store->set("over", "1");
    } else {
      r.store->get("over", std::chrono::seconds(20));
      r.communicator->abort("the other one gave up");
      require(peer_error([&] { r.communicator->barrier(); }) == "the other one gave up", "the reason");
    }
    (void)cudaemu::take_reports();
  });
  expect_all_well(outcomes);
}

TEST(NcclCommunicator, AbortEndsAWaitOfAnotherThread) {
  StoreServer server("127.0.0.1", 0, "secret");
  const auto outcomes = run_processes(2, [&](int rank) {
    Rank r(rank, 2, server.port());
    r.communicator->barrier();
    if (rank == 0) {
      std::thread watchdog([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        r.communicator->abort("watchdog");
      });
      const std::string text = peer_error([&] { r.communicator->barrier(); });
      watchdog.join();
      require(text == "watchdog", text);
      r.store->set("over", "1");
    } else {
      r.store->get("over", std::chrono::seconds(20));
    }
    (void)cudaemu::take_reports();
  });
  EXPECT_EQ(outcomes[0].exit_code, 0) << outcomes[0].errors;
}

TEST(NcclCommunicator, PinsWhatTheUserHasNotSet) {
  ::setenv("NCCL_ALGO", "Tree", 1);
  ::unsetenv("NCCL_PROTO");
  pin_nccl_environment();
  EXPECT_STREQ(std::getenv("NCCL_ALGO"), "Tree");
  EXPECT_STREQ(std::getenv("NCCL_PROTO"), "Simple");
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

}  // namespace
}  // namespace onnxddp::cuda

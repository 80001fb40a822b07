// The same cases over every communicator.
#include "distributed/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "distributed/store.h"

namespace onnxddp {
namespace {

using std::chrono::milliseconds;
using Body = std::function<void(Communicator&)>;

// Ranks of a back end for processes in threads of this process: it does not know the difference.
void run_backend(const std::string& backend, int size, const Body& body, milliseconds timeout) {
  const auto store = make_memory_store();
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        CommunicatorOptions options;
        options.backend = backend;
        options.rank = rank;
        options.size = size;
        options.store = store.get();
        options.timeout = timeout;
        options.heartbeat = milliseconds(100);
        const auto communicator = make_communicator(options);
        body(*communicator);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

[[maybe_unused]] void run_gloo(int size, const Body& body, milliseconds timeout) {
  run_backend("gloo", size, body, timeout);
}
void run_shm(int size, const Body& body, milliseconds timeout) { run_backend("shm", size, body, timeout); }

struct Backend {
  const char* name;
  void (*run)(int size, const Body& body, milliseconds timeout);
};
void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

class CommunicatorTest : public testing::TestWithParam<std::tuple<Backend, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }
  void run(const Body& body, milliseconds timeout = milliseconds(20'000)) {
    std::get<0>(GetParam()).run(size(), body, timeout);
  }
};

// A value whose sum over ranks depends on the order of summation.
template <class T>
T value(int rank, std::size_t i) {
  if (std::is_integral_v<T>) return static_cast<T>((rank + 1) * 1000 + static_cast<int>(i));
  return static_cast<T>(std::sin(static_cast<double>(i + 1)) *
                        std::pow(10.0, (rank * 7 + static_cast<int>(i)) % 9 - 4));
}
template <class T>
std::vector<T> values(int rank, std::size_t count) {
  std::vector<T> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = value<T>(rank, i);
  return all;
}
template <class T>
std::vector<T> sums(int size, std::size_t count) {
  auto total = values<T>(0, count);
  for (int r = 1; r < size; ++r) {
    for (std::size_t i = 0; i < count; ++i) total[i] += value<T>(r, i);
  }
  return total;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
void check_all_reduce(Communicator& c, DType dtype) {
  for (std::size_t count : {0, 1, 3, 17, 1000, 4097, 100'003}) {
    auto data = values<T>(c.rank(), count);
    c.all_reduce(data.data(), count, dtype);
    EXPECT_TRUE(same_bits(data, sums<T>(c.size(), count))) << count << " elements on rank " << c.rank();
  }
}

/// What only groups of several ranks can show.
class PeersTest : public CommunicatorTest {};

TEST_P(CommunicatorTest, AllReduceSumsInRankOrder) {
  run([](Communicator& c) {
    check_all_reduce<float>(c, DType::f32);
    check_all_reduce<double>(c, DType::f64);
    check_all_reduce<std::int64_t>(c, DType::i64);
  });
}

TEST_P(CommunicatorTest, AllReduceRefusesOtherTypes) {
  run([](Communicator& c) {
    char data[4] = {};
    EXPECT_THROW(c.all_reduce(data, 2, DType::bf16), InternalError);
  });
}

TEST_P(CommunicatorTest, AllGatherConcatenatesInRankOrder) {
  run([](Communicator& c) {
    for (std::size_t count : {0, 1, 5, 50'000}) {
      const auto own = values<double>(c.rank(), count);
      std::vector<double> all(count * static_cast<std::size_t>(c.size())), expected;
      c.all_gather(own.data(), count * sizeof(double), all.data());
      for (int r = 0; r < c.size(); ++r) {
        const auto part = values<double>(r, count);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      EXPECT_TRUE(same_bits(all, expected)) << count;
    }
  });
}

TEST_P(CommunicatorTest, AllGatherWorksInPlace) {
  run([](Communicator& c) {
    std::vector<int> all(static_cast<std::size_t>(c.size()), -1), expected(all.size());
    std::iota(expected.begin(), expected.end(), 0);
    all[static_cast<std::size_t>(c.rank())] = c.rank();
    c.all_gather(&all[static_cast<std::size_t>(c.rank())], sizeof(int), all.data());
    EXPECT_EQ(all, expected);
  });
}

TEST_P(CommunicatorTest, ReduceScatterGivesEachRankItsBlock) {
  run([](Communicator& c) {
    for (std::size_t count : {0, 1, 7, 30'000}) {
      const auto in = values<float>(c.rank(), count * static_cast<std::size_t>(c.size()));
      std::vector<float> out(count);
      c.reduce_scatter(in.data(), count, DType::f32, out.data());
      const auto total = sums<float>(c.size(), in.size());
      const auto begin = total.begin() + static_cast<std::ptrdiff_t>(count) * c.rank();
      EXPECT_TRUE(same_bits(out, {begin, begin + static_cast<std::ptrdiff_t>(count)})) << count;
    }
  });
}

TEST_P(CommunicatorTest, BroadcastTakesTheRootsBytes) {
  run([](Communicator& c) {
    for (int root = 0; root < c.size(); ++root) {
      for (std::size_t count : {0, 1, 200'000}) {
        auto data = values<float>(c.rank(), count);
        c.broadcast(data.data(), count * sizeof(float), root);
        EXPECT_TRUE(same_bits(data, values<float>(root, count))) << count << " from " << root;
      }
    }
  });
}

TEST_P(CommunicatorTest, BarrierHoldsUntilAllAreThere) {
  std::atomic<int> arrived{0};
  run([&](Communicator& c) {
    for (int round = 1; round <= 3; ++round) {
      ++arrived;
      c.barrier();
      EXPECT_GE(arrived.load(), round * c.size());
    }
  });
}

TEST_P(CommunicatorTest, ManySmallCollectivesInARow) {
  run([](Communicator& c) {
    for (int i = 0; i < 300; ++i) {
      float x = static_cast<float>(c.rank() + i);
      c.all_reduce(&x, 1, DType::f32);
      EXPECT_EQ(x, static_cast<float>(c.size() * i + c.size() * (c.size() - 1) / 2));
      std::int64_t y = c.rank() == i % c.size() ? i : -1;
      c.broadcast(&y, sizeof(y), i % c.size());
      EXPECT_EQ(y, i);
    }
  });
}

// Runs with the last rank missing; returns the message of rank 0's PeerError.
std::string failure_of(const std::function<void(const Body&)>& run, const Body& last) {
  std::string message;
  try {
    run([&](Communicator& c) {
      c.note_step(118);
      c.barrier();
      if (c.rank() == c.size() - 1) return last(c);
      std::vector<float> data(10'000);
      try {
        c.all_reduce(data.data(), data.size(), DType::f32);
        ADD_FAILURE() << "rank " << c.rank() << " did not notice";
      } catch (const PeerError& error) {
        if (c.rank() == 0) message = error.what();
        EXPECT_THROW(c.barrier(), PeerError);  // stays failed
        throw;
      }
    });
  } catch (const std::exception&) {
  }
  return message;
}

TEST_P(PeersTest, AFailingRankWakesTheOthers) {
  const auto start = std::chrono::steady_clock::now();
  const std::string message =
      failure_of([this](const Body& body) { run(body); }, [](Communicator&) { throw Error("no such row"); });
  EXPECT_FALSE(message.empty());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST_P(PeersTest, AMissingRankIsNoticedAtTheDeadline) {
  const std::string message =
      failure_of([this](const Body& body) { run(body, milliseconds(500)); },
                 [](Communicator&) { std::this_thread::sleep_for(milliseconds(1500)); });
  EXPECT_NE(message.find(cat("rank ", size() - 1)), std::string::npos) << message;
}

TEST_P(PeersTest, AbortWakesACollective) {
  const std::string message = failure_of(
      [this](const Body& body) {
        run([&](Communicator& c) {
          std::thread helper;
          if (c.rank() == 0) {
            helper = std::thread([&] {
              std::this_thread::sleep_for(milliseconds(100));
              c.abort("stopped by the watchdog");
            });
          }
          try {
            body(c);
          } catch (const Error&) {
          }
          if (helper.joinable()) helper.join();
        });
      },
      [](Communicator&) { std::this_thread::sleep_for(milliseconds(300)); });
  EXPECT_FALSE(message.empty());
}

const auto kBackends =
#ifdef __SANITIZE_THREAD__  // libgloo is not compiled with it, and hides how its threads synchronise
    testing::Values(Backend{"thread", run_ranks}, Backend{"shm", run_shm});
#else
    testing::Values(Backend{"thread", run_ranks}, Backend{"gloo", run_gloo}, Backend{"shm", run_shm});
#endif
std::string case_name(const testing::TestParamInfo<std::tuple<Backend, int>>& test) {
  return cat(std::get<0>(test.param).name, std::get<1>(test.param));
}
INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, testing::Combine(kBackends, testing::Values(1, 2, 3, 5)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Backends, PeersTest, testing::Combine(kBackends, testing::Values(2, 3, 5)),
                         case_name);

TEST(Communicator, SoloIsTheIdentity) {
  const auto c = make_communicator({});
  EXPECT_EQ(c->size(), 1);
  float x = 3, y = 0;
  c->all_reduce(&x, 1, DType::f32);
  c->all_gather(&x, sizeof(x), &y);
  EXPECT_EQ(y, 3);
  c->reduce_scatter(&x, 1, DType::f32, &y);
  c->broadcast(&x, sizeof(x), 0);
  c->barrier();
  EXPECT_EQ(x, 3);
}

TEST(Communicator, RefusesUnknownBackends) {
  CommunicatorOptions options;
  options.backend = "carrier-pigeon";
  EXPECT_THROW(make_communicator(options), Error);
}

TEST(ThreadRanks, RethrowTheFirstFailure) {
  try {
    run_ranks(3, [](Communicator& c) {
      if (c.rank() == 1) throw Error("row 7 is not a number");
      c.barrier();
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "row 7 is not a number");
  }
}

TEST(ThreadRanks, NameTheRankThatFailed) {
  run_ranks(2, [](Communicator& c) {
    if (c.rank() == 1) return;
    try {
      c.barrier();
      FAIL();
    } catch (const PeerError& error) {
      EXPECT_STREQ(error.what(), "rank 1 has ended");
      EXPECT_EQ(error.exit_code(), kExitPeer);
    }
  });
}

TEST(ThreadRanks, SeeDifferentCollectives) {
  EXPECT_THROW(run_ranks(2,
                         [](Communicator& c) {
                           float x = 0;
                           if (c.rank() == 0) {
                             c.all_reduce(&x, 1, DType::f32);
                           } else {
                             c.broadcast(&x, sizeof(x), 0);
                           }
                         }),
               InternalError);
}

}  // namespace
}  // namespace onnxddp

#include "distributed/store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <thread>

#include "distributed/communicator.h"

namespace onnxddp {
namespace {

using std::chrono::milliseconds;

constexpr const char* kHost = "127.0.0.1";

// The same cases over both stores.
class StoreTest : public testing::TestWithParam<bool> {
 protected:
  StoreTest() {
    if (GetParam()) {
      store_ = make_memory_store();
    } else {
      server_ = std::make_unique<StoreServer>(kHost, 0, "secret");
      store_ = connect_store(kHost, server_->port(), "secret", milliseconds(5'000));
    }
  }
  std::unique_ptr<StoreServer> server_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreTest, SetsGetsAndCounts) {
  EXPECT_EQ(store_->try_get("a/b.c-d_1"), std::nullopt);
  store_->set("a/b.c-d_1", std::string("x\0y", 3));
  EXPECT_EQ(store_->try_get("a/b.c-d_1"), std::string("x\0y", 3));
  store_->set("a/b.c-d_1", "");
  EXPECT_EQ(store_->get("a/b.c-d_1", milliseconds(0)), "");
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(store_->try_get("n"), "-2");
}

TEST_P(StoreTest, PassesLargeValues) {
  const std::string large(3 << 20, 'x');
  store_->set("large", large);
  EXPECT_EQ(store_->try_get("large"), large);
}

TEST_P(StoreTest, WaitsForKeysOfOthers) {
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    store_->set("one", "1");
    std::this_thread::sleep_for(milliseconds(50));
    store_->add("two", 2);
  });
  store_->wait({"one", "two"}, milliseconds(10'000));
  EXPECT_EQ(store_->get("two", milliseconds(0)), "2");
  setter.join();
}

TEST_P(StoreTest, AWaitHasADeadline) {
  try {
    store_->wait({"never", "ever"}, milliseconds(50));
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_STREQ(error.what(), "no rank has set 'never' and 1 more in the store within 0.05 s");
  }
  EXPECT_THROW(store_->get("never", milliseconds(1)), PeerError);
}

TEST_P(StoreTest, AWaitHoldsUpNobody) {
  std::thread waiter([&] { store_->wait({"late"}, milliseconds(10'000)); });
  for (int i = 0; i < 20; ++i) store_->add("busy", 1);
  EXPECT_EQ(store_->try_get("busy"), "20");
  store_->set("late", "");
  waiter.join();
}

TEST_P(StoreTest, HasLimits) {
  EXPECT_THROW(store_->set("", "x"), Error);
  EXPECT_THROW(store_->set(std::string(257, 'k'), "x"), Error);
  EXPECT_THROW(store_->set("a key", "x"), Error);
  EXPECT_THROW(store_->try_get("naïve"), Error);
  EXPECT_THROW(store_->set("k", std::string((16 << 20) + 1, 'x')), Error);
  store_->set("text", "twelve");
  EXPECT_THROW(store_->add("text", 1), Error);
  const std::string mib15(15 << 20, 'x');
  for (int i = 0; i < 4; ++i) store_->set(cat("big", i), mib15);
  EXPECT_THROW(store_->set("big4", mib15), Error);
  store_->set("big0", "");  // still works
  store_->set("big4", mib15);
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreTest, testing::Bool(),
                         [](const auto& test) { return test.param ? "memory" : "tcp"; });

TEST(Store, HasALimitOfKeys) {
  const auto store = make_memory_store();
  for (int i = 0; i < 65536; ++i) store->set(std::to_string(i), "");
  EXPECT_THROW(store->set("one-more", ""), Error);
  store->set("7", "x");
}

TEST(StoreServer, ServesManyClients) {
  StoreServer server(kHost, 0, "secret");
  std::vector<std::thread> threads;
  for (int i = 0; i < 20; ++i) {
    threads.emplace_back([&, i] {
      const auto client = connect_store(kHost, server.port(), "secret", milliseconds(20'000));
      client->set(cat("client/", i), cat(i));
      for (int k = 0; k < 50; ++k) client->add("sum", i);
      client->wait({"client/0", "client/19"}, milliseconds(20'000));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(server.local().try_get("sum"), cat(50 * 190));
}

TEST(StoreServer, LocalChangesWakeClients) {
  StoreServer server(kHost, 0, "secret");
  const auto client = connect_store(kHost, server.port(), "secret", milliseconds(5'000));
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    server.local().set("from", "launcher");
  });
  EXPECT_EQ(client->get("from", milliseconds(10'000)), "launcher");
  setter.join();
}

TEST(StoreServer, RefusesAnotherSecret) {
  StoreServer server(kHost, 0, "secret");
  try {
    connect_store(kHost, server.port(), "another", milliseconds(5'000));
    FAIL();
  } catch (const PeerError&) {
    FAIL() << "not a peer's failure";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("refused the secret"));
  }
  EXPECT_NO_THROW(connect_store(kHost, server.port(), "secret", milliseconds(5'000)));
}

TEST(StoreServer, APortInUseIsAUsageError) {
  StoreServer server(kHost, 0, "secret");
  try {
    StoreServer second(kHost, server.port(), "secret");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), kExitUsage);
  }
}

TEST(StoreClient, RetriesUntilTheServerIsThere) {
  std::uint16_t port;
  { port = StoreServer(kHost, 0, "s").port(); }
  std::unique_ptr<StoreServer> server;
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(100));
    server = std::make_unique<StoreServer>(kHost, port, "s");
  });
  EXPECT_NO_THROW(connect_store(kHost, port, "s", milliseconds(20'000)));
  late.join();
  server.reset();
  EXPECT_THROW(connect_store(kHost, port, "s", milliseconds(50)), PeerError);
}

TEST(StoreClient, AServerThatGoesAwayIsAPeerError) {
  auto server = std::make_unique<StoreServer>(kHost, 0, "s");
  const auto client = connect_store(kHost, server->port(), "s", milliseconds(5'000));
  std::thread stopper([&] {
    std::this_thread::sleep_for(milliseconds(50));
    server.reset();
  });
  EXPECT_THROW(client->wait({"never"}, milliseconds(20'000)), PeerError);
  stopper.join();
}

// A connection that speaks no protocol.
class RawClient {
 public:
  explicit RawClient(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    const timeval limit{10, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~RawClient() { ::close(fd_); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool connected() const { return connected_; }
  void send(const std::string& bytes) const {
    [[maybe_unused]] const auto n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // True once the server has closed the connection.
  bool closed() const {
    char bytes[256];
    ssize_t n;
    do n = ::recv(fd_, bytes, sizeof(bytes), 0);
    while (n > 0);
    return n == 0 || errno == ECONNRESET;
  }

 private:
  int fd_;
  bool connected_ = false;
};

TEST(StoreServer, StrangersDisturbNobody) {
  StoreServer server(kHost, 0, "secret");
  const auto client = connect_store(kHost, server.port(), "secret", milliseconds(5'000));
  client->set("key", "value");
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const RawClient stranger(server.port());
    ASSERT_TRUE(stranger.connected());
    std::string noise(random() % 200, '\0');
    for (auto& c : noise) c = static_cast<char>(random());
    stranger.send(noise);
    if (noise.size() > 58) {
      EXPECT_TRUE(stranger.closed());
    }
  }
  const RawClient http(server.port());
  http.send("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a long enough line to fill the login\r\n\r\n");
  EXPECT_TRUE(http.closed());
  EXPECT_EQ(client->try_get("key"), "value");
  EXPECT_NO_THROW(connect_store(kHost, server.port(), "secret", milliseconds(5'000)));
}

TEST(StoreServer, SilentStrangersAreTurnedAway) {
  StoreServer server(kHost, 0, "secret");
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<RawClient>> strangers;
  for (int i = 0; i < 80; ++i) strangers.push_back(std::make_unique<RawClient>(server.port()));
  EXPECT_TRUE(strangers.front()->closed());  // more than 64: the oldest goes at once
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(4'000));
  EXPECT_NO_THROW(connect_store(kHost, server.port(), "secret", milliseconds(5'000)));
  EXPECT_TRUE(strangers.back()->closed());  // after the login time
}

TEST(StoreServer, SecretsAreLongAndDiffer) {
  EXPECT_EQ(random_secret().size(), 64u);
  EXPECT_NE(random_secret(), random_secret());
}

}  // namespace
}  // namespace onnxddp

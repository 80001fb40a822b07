// The client side of the store. Plain sockets: every wait has one deadline.
#include "distributed/store.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

#include "distributed/communicator.h"
#include "distributed/store_frame.h"
#include "distributed/store_table.h"

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kAnswerTime{15'000};  // for a request that does not wait
constexpr milliseconds kLongestWait{3'600'000};

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Waits for `events`; false at the deadline.
bool ready(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    pollfd p{fd, events, 0};
    const int n = ::poll(&p, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000)));
    if (n > 0) return true;
    if (n == 0 || errno != EINTR) return false;
  }
}

void set_options(int fd) {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 15'000);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

// One attempt. A descriptor of -1: refused or unreachable, with the reason in errno.
Descriptor connect_once(const addrinfo& address, Clock::time_point deadline) {
  Descriptor fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return fd;
  set_options(fd.get());
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return fd;
  if (errno != EINPROGRESS) return Descriptor();
  int error = ETIMEDOUT;
  socklen_t size = sizeof(error);
  if (ready(fd.get(), POLLOUT, deadline)) ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  errno = error;
  return error == 0 ? std::move(fd) : Descriptor();
}

// One logged-in connection; one request at a time.
class Connection {
 public:
  Connection(Descriptor fd, std::string name, const std::string& secret, Clock::time_point deadline)
      : fd_(std::move(fd)), name_(std::move(name)), keys_(login(secret, deadline)) {}

  std::string request(const std::string& payload, Clock::time_point deadline) {
    send(keys_.seal(false, sent_++, payload), deadline);
    const std::string head = receive(kFrameHead, deadline);
    FrameReader reader(head);
    const std::size_t length = reader.number(4);
    if (length > kMaxFrame) throw PeerError(cat(name_, " sent a malformed frame"));
    const std::string answer = receive(length, deadline);
    if (!keys_.genuine(true, received_++, answer, reader.raw(kMac).data()))
      throw PeerError(cat(name_, " sent a forged frame"));
    return answer;
  }

 private:
  StoreKeys login(const std::string& secret, Clock::time_point deadline) {
    const std::string greeting = receive(kGreeting, deadline);
    if (greeting.compare(0, 8, kStoreMagic) != 0)
      throw Error(cat(name_, " is no store: something else listens there"));
    FrameReader reader(std::string_view(greeting).substr(8));
    if (const auto version = reader.number(2); version != kStoreVersion) {
      throw Error(cat(name_, " speaks version ", version, " of the protocol, this program ", kStoreVersion));
    }
    std::string nonce(kNonce, '\0');
    fill_random(nonce.data(), kNonce);
    const StoreKeys keys(secret, reader.raw(kNonce), nonce);
    send(std::string(kStoreMagic) + FrameWriter().number(kStoreVersion, 2).take() + nonce +
             std::string(reinterpret_cast<const char*>(keys.client_proof.data()), 32),
         deadline);
    const std::string welcome = receive(kWelcome, deadline);
    const auto* proof = reinterpret_cast<const unsigned char*>(welcome.data()) + 1;
    if (welcome[0] != 0 || !same_secret(proof, keys.server_proof.data(), 32)) {
      throw Error(cat(name_, " refused the secret")).hint("the port belongs to another job");
    }
    return keys;
  }

  void send(const std::string& bytes, Clock::time_point deadline) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::send(fd_.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (n > 0) {
        done += static_cast<std::size_t>(n);
      } else if (errno == EAGAIN) {
        if (!ready(fd_.get(), POLLOUT, deadline)) throw PeerError(cat(name_, " does not answer"));
      } else if (errno != EINTR) {
        throw PeerError(cat(name_, " is gone: ", std::strerror(errno)));
      }
    }
  }

  std::string receive(std::size_t count, Clock::time_point deadline) {
    std::string bytes(count, '\0');
    std::size_t done = 0;
    while (done < count) {
      const ssize_t n = ::recv(fd_.get(), bytes.data() + done, count - done, 0);
      if (n > 0) {
        done += static_cast<std::size_t>(n);
      } else if (n == 0) {
        throw PeerError(cat(name_, " is gone: it closed the connection"));
      } else if (errno == EAGAIN) {
        if (!ready(fd_.get(), POLLIN, deadline)) throw PeerError(cat(name_, " does not answer"));
      } else if (errno != EINTR) {
        throw PeerError(cat(name_, " is gone: ", std::strerror(errno)));
      }
    }
    return bytes;
  }

  Descriptor fd_;
  std::string name_;
  StoreKeys keys_;
  std::uint64_t sent_ = 0, received_ = 0;
};

// Requests take an idle connection or open one more, so that a waiting thread holds up no other.
class TcpStore : public Store {
 public:
  TcpStore(std::string host, std::uint16_t port, std::string secret, milliseconds timeout)
      : host_(std::move(host)), port_(port), secret_(std::move(secret)) {
    idle_.push_back(connect(Clock::now() + timeout, true));
  }

  void set(const std::string& key, const std::string& value) override {
    check_key(key);
    if (value.size() > kMaxValue)
      throw Error(cat("a store value may have ", kMaxValue, " bytes, not ", value.size()));
    request(start(StoreOp::set).text(key).text(value));
  }
  std::optional<std::string> try_get(const std::string& key) override {
    check_key(key);
    return request(start(StoreOp::get).text(key));
  }
  std::string get(const std::string& key, milliseconds timeout) override {
    if (auto value = try_get(key)) return *value;
    wait({key}, timeout);
    return *try_get(key);  // keys are never removed
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    check_key(key);
    return std::stoll(*request(start(StoreOp::add).text(key).number(static_cast<std::uint64_t>(amount), 8)));
  }
  void wait(const std::vector<std::string>& keys, milliseconds timeout) override {
    CHECK(keys.size() <= kMaxWaitKeys, keys.size());
    const milliseconds bounded = std::clamp(timeout, milliseconds(0), kLongestWait);
    auto writer = start(StoreOp::wait);
    writer.number(static_cast<std::uint64_t>(bounded.count()), 4).number(keys.size(), 4);
    for (const auto& key : keys) {
      check_key(key);
      writer.text(key);
    }
    if (!request(writer, bounded)) throw_wait_timeout(keys, bounded);
  }

 private:
  static FrameWriter start(StoreOp op) {
    FrameWriter writer;
    writer.number(static_cast<std::uint64_t>(op), 1);
    return writer;
  }

  // The answer's value; nothing when the key is missing or the wait took too long.
  std::optional<std::string> request(FrameWriter& writer, milliseconds extra = milliseconds(0)) {
    const auto deadline = Clock::now() + kAnswerTime + extra;
    std::unique_ptr<Connection> connection;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        connection = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!connection) connection = connect(deadline, false);
    const std::string answer = connection->request(writer.take(), deadline);
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(connection));
    }
    FrameReader reader(answer);
    const auto status = static_cast<StoreStatus>(reader.number(1));
    std::string value = reader.text();
    if (status == StoreStatus::error) throw Error(value);
    if (status == StoreStatus::missing) return std::nullopt;
    return value;
  }

  // `wait_for_server`: it may not have started yet; later a refusal means that it is gone.
  std::unique_ptr<Connection> connect(Clock::time_point deadline, bool wait_for_server) const {
    const std::string name = cat("the store at ", host_, ":", port_);
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = ::getaddrinfo(host_.c_str(), std::to_string(port_).c_str(), &hints, &found);
        error != 0) {
      throw usage_error(cat("cannot find host '", host_, "': ", ::gai_strerror(error)));
    }
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
    for (milliseconds pause{10};; pause = std::min(2 * pause, milliseconds(500))) {
      for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
        Descriptor fd = connect_once(*a, deadline);
        if (fd.get() >= 0) return std::make_unique<Connection>(std::move(fd), name, secret_, deadline);
      }
      if (!wait_for_server || Clock::now() + pause > deadline)
        throw PeerError(cat("cannot reach ", name, ": ", std::strerror(errno)));
      std::this_thread::sleep_for(pause);
    }
  }

  const std::string host_;
  const std::uint16_t port_;
  const std::string secret_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_;
};

}  // namespace

std::unique_ptr<Store> connect_store(const std::string& host, std::uint16_t port, const std::string& secret,
                                     milliseconds timeout) {
  return std::make_unique<TcpStore>(host, port, secret, timeout);
}

}  // namespace onnxddp

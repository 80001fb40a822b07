// The serving side of the store: one thread, Asio.
#include <algorithm>
#include <array>
#include <asio.hpp>
#include <csignal>
#include <deque>
#include <thread>

#include "distributed/store_frame.h"
#include "distributed/store_table.h"

namespace onnxddp {
namespace {

using asio::ip::tcp;
using std::chrono::milliseconds;

constexpr std::size_t kMaxStrangers = 64;  // connections that have not logged in
constexpr std::chrono::seconds kLoginTime{5};
constexpr std::size_t kPiece =
    64 << 10;  // a frame's buffer grows with what has arrived, not with what was announced

// Threads of the library must not take the process's signals.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

class Session;

// What the sessions share.
struct Shared {
  explicit Shared(std::string s)
      : secret(std::move(s)), table([this] { asio::post(io, [this] { wake(); }); }) {}
  void wake();

  const std::string secret;
  asio::io_context io{1};
  StoreTable table;
  std::vector<std::shared_ptr<Session>> parked;  // in a wait
  std::deque<std::weak_ptr<Session>> strangers;  // oldest first
};

// One client. A malformed or forged byte closes its connection and concerns nobody else.
class Session : public std::enable_shared_from_this<Session> {
  // Wraps a handler: errors of the connection and exceptions of `body` close it.
  template <class Body>
  auto then(Body body) {
    return [self = shared_from_this(), body](asio::error_code error, std::size_t) mutable {
      if (error) return self->close();
      try {
        body();
      } catch (const std::exception&) {
        self->close();
      }
    };
  }

 public:
  Session(Shared& shared, tcp::socket socket)
      : shared_(shared), socket_(std::move(socket)), timer_(shared.io) {}

  bool known() const { return known_; }
  void close() {
    asio::error_code ignored;
    socket_.close(ignored);
    timer_.cancel();
  }

  void start() {
    asio::error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    nonce_.resize(kNonce);
    fill_random(nonce_.data(), kNonce);
    out_ = std::string(kStoreMagic) + FrameWriter().number(kStoreVersion, 2).take() + nonce_;
    timer_.expires_after(kLoginTime);
    timer_.async_wait([self = shared_from_this()](asio::error_code error) {
      if (!error && !self->known_) self->close();
    });
    asio::async_write(socket_, asio::buffer(out_), then([this] {
                        in_.resize(kLogin);
                        asio::async_read(socket_, asio::buffer(in_), then([this] { login(); }));
                      }));
  }

  // A wait may have come true.
  bool try_finish_wait() {
    if (!shared_.table.has_all(keys_)) return false;
    timer_.cancel();
    reply(StoreStatus::ok);
    return true;
  }

 private:
  void login() {
    FrameReader reader(in_);
    const bool same = reader.raw(8) == kStoreMagic && reader.number(2) == kStoreVersion;
    const std::string nonce(reader.raw(kNonce));
    keys_of_session_.emplace(shared_.secret, nonce_, nonce);
    const auto proof = reader.raw(32);
    known_ = same && same_secret(keys_of_session_->client_proof.data(),
                                 reinterpret_cast<const unsigned char*>(proof.data()), 32);
    timer_.cancel();
    out_ = std::string(1, known_ ? '\0' : '\1');
    if (known_) {
      out_.append(reinterpret_cast<const char*>(keys_of_session_->server_proof.data()), 32);
    } else {
      out_.append(32, '\0');
    }
    asio::async_write(socket_, asio::buffer(out_), then([this] {
                        if (!known_) return close();
                        read_frame();
                      }));
  }

  void read_frame() {
    in_.resize(kFrameHead);
    asio::async_read(socket_, asio::buffer(in_), then([this] {
                       FrameReader reader(in_);
                       length_ = reader.number(4);
                       mac_ = std::string(reader.raw(kMac));
                       if (length_ > kMaxFrame) return close();
                       in_.clear();
                       read_body();
                     }));
  }

  void read_body() {
    const std::size_t have = in_.size();
    if (have == length_) {
      if (!keys_of_session_->genuine(false, received_++, in_, mac_.data())) return close();
      return handle();
    }
    in_.resize(std::min(length_, have + kPiece));
    asio::async_read(socket_, asio::buffer(in_.data() + have, in_.size() - have),
                     then([this] { read_body(); }));
  }

  void handle() {
    FrameReader reader(in_);
    const auto op = static_cast<StoreOp>(reader.number(1));
    try {
      if (op == StoreOp::wait) return handle_wait(reader);
      const std::string key = reader.text();
      if (op == StoreOp::set) {
        const std::string value = reader.text();
        reader.finish();
        shared_.table.set(key, value);
        reply(StoreStatus::ok);
      } else if (op == StoreOp::get) {
        reader.finish();
        const auto value = shared_.table.try_get(key);
        reply(value ? StoreStatus::ok : StoreStatus::missing, value.value_or(""));
      } else if (op == StoreOp::add) {
        const auto amount = static_cast<std::int64_t>(reader.number(8));
        reader.finish();
        reply(StoreStatus::ok, std::to_string(shared_.table.add(key, amount)));
      } else {
        close();
      }
    } catch (const Error& error) {
      reply(StoreStatus::error, error.what());
    }
  }

  void handle_wait(FrameReader& reader) {
    const milliseconds timeout(static_cast<std::int64_t>(reader.number(4)));
    const auto count = reader.number(4);
    if (count > kMaxWaitKeys) return close();
    keys_.clear();
    for (std::uint64_t i = 0; i < count; ++i) check_key(keys_.emplace_back(reader.text()));
    reader.finish();
    if (shared_.table.has_all(keys_)) return reply(StoreStatus::ok);
    shared_.parked.push_back(shared_from_this());
    timer_.expires_after(timeout);
    timer_.async_wait([self = shared_from_this()](asio::error_code error) {
      auto& parked = self->shared_.parked;
      const auto found = std::find(parked.begin(), parked.end(), self);
      if (error || found == parked.end()) return;
      parked.erase(found);
      self->reply(StoreStatus::missing);
    });
  }

  void reply(StoreStatus status, const std::string& value = "") {
    const std::string payload =
        FrameWriter().number(static_cast<std::uint64_t>(status), 1).text(value).take();
    out_ = keys_of_session_->seal(true, sent_++, payload);
    asio::async_write(socket_, asio::buffer(out_), then([this] { read_frame(); }));
  }

  Shared& shared_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  bool known_ = false;
  std::string nonce_, in_, out_, mac_;
  std::size_t length_ = 0;
  std::optional<StoreKeys> keys_of_session_;
  std::uint64_t received_ = 0, sent_ = 0;
  std::vector<std::string> keys_;  // of the wait
};

void Shared::wake() {
  auto waiting = std::move(parked);
  parked.clear();
  for (auto& session : waiting) {
    if (!session->try_finish_wait()) parked.push_back(std::move(session));
  }
}

}  // namespace

struct StoreServer::Impl {
  Impl(const std::string& host, std::uint16_t port, const std::string& secret)
      : shared(secret), acceptor(shared.io), retry(shared.io) {
    asio::error_code error;
    const auto found = tcp::resolver(shared.io).resolve(host, std::to_string(port), error);
    if (error || found.empty())
      throw usage_error(cat("cannot serve the store on '", host, "': ", error.message()));
    const tcp::endpoint endpoint = *found.begin();
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      throw usage_error(cat("cannot serve the store on ", host, ":", port, ": ", error.message()))
          .hint("choose another --master-port");
    }
    accept();
    const BlockSignals block;
    thread = std::thread([this] { shared.io.run(); });
  }
  ~Impl() {
    shared.io.stop();
    thread.join();
    shared.parked.clear();
  }

  void accept() {
    acceptor.async_accept([this](asio::error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) {  // out of descriptors: connections wait in the queue until some are free
        retry.expires_after(milliseconds(100));
        return retry.async_wait([this](asio::error_code cancelled) {
          if (!cancelled) accept();
        });
      }
      const auto session = std::make_shared<Session>(shared, std::move(socket));
      session->start();
      remember(session);
      accept();
    });
  }

  void remember(const std::shared_ptr<Session>& session) {
    auto& strangers = shared.strangers;
    const auto settled = [](const std::weak_ptr<Session>& weak) {
      const auto s = weak.lock();
      return !s || s->known();
    };
    strangers.erase(std::remove_if(strangers.begin(), strangers.end(), settled), strangers.end());
    strangers.push_back(session);
    if (strangers.size() > kMaxStrangers) {
      if (const auto oldest = strangers.front().lock()) oldest->close();
      strangers.pop_front();
    }
  }

  Shared shared;
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  std::thread thread;
};

StoreServer::StoreServer(const std::string& host, std::uint16_t port, const std::string& secret)
    : impl_(std::make_unique<Impl>(host, port, secret)) {}
StoreServer::~StoreServer() = default;
std::uint16_t StoreServer::port() const { return impl_->acceptor.local_endpoint().port(); }
Store& StoreServer::local() { return impl_->shared.table; }

}  // namespace onnxddp

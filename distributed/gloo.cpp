// Ranks that are processes, over TCP by Gloo's point-to-point messages. The collectives are ours: sums in
// rank order.
#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <cstring>
#include <exception>
#include <mutex>

#include "distributed/backends.h"
#include "distributed/reduce.h"
#include "distributed/store.h"

namespace onnxddp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Buffer = gloo::transport::UnboundBuffer;

constexpr std::size_t kSmall =
    16 << 10;  // up to here everybody sends everything to everybody: one trip instead of two
constexpr milliseconds kFarewell{2'000};

// Our store in the shape that Gloo meets at.
class Rendezvous : public gloo::rendezvous::Store {
 public:
  Rendezvous(onnxddp::Store& store, std::string scope, milliseconds timeout)
      : store_(store), scope_(std::move(scope)), timeout_(timeout) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(name(key), {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_.get(name(key), timeout_);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    std::vector<std::string> names;
    for (const auto& key : keys) names.push_back(name(key));
    store_.wait(names, timeout);
  }

 private:
  std::string name(const std::string& key) const { return scope_ + "/" + key; }
  onnxddp::Store& store_;
  const std::string scope_;
  const milliseconds timeout_;
};

class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(const CommunicatorOptions& options, const std::string& scope)
      : store_(*options.store), scope_(scope + "/gloo"), timeout_(options.timeout) {
    gloo::transport::tcp::attr attr;
    attr.hostname = options.host;
    guard("connecting the ranks", [&] {
      auto device = gloo::transport::tcp::CreateDevice(attr);
      context_ = std::make_shared<gloo::rendezvous::Context>(options.rank, options.size);
      context_->setTimeout(timeout_);
      Rendezvous rendezvous(store_, scope_, timeout_);
      context_->connectFullMesh(rendezvous, device);
    });
  }

  // A connection that is closed with unread bytes takes back what the peer has not read yet: all leave
  // together.
  ~GlooCommunicator() override {
    if (!failure_.empty() || std::uncaught_exceptions() > 0) return;
    try {
      if (store_.add(scope_ + "/left", 1) == size()) store_.set(scope_ + "/all-left", "");
      store_.wait({scope_ + "/all-left"}, kFarewell);
    } catch (const std::exception&) {
      // A peer that stays behind has failed, and says so itself.
    }
  }

  int rank() const override { return context_->rank; }
  int size() const override { return context_->size; }

  void all_reduce(void* data, std::size_t count, DType dtype) override {
    const std::size_t width = reducible_size(dtype), bytes = count * width;
    if (bytes == 0 || size() == 1) return;
    guard("AllReduce", [&] {
      if (bytes <= kSmall) {
        gather(data, bytes, scratch(bytes * ranks()));
        return ordered_sum(blocks(scratch_.data(), bytes), count, dtype, data);
      }
      auto* base = static_cast<char*>(data);
      const Span own = share_of(count, rank(), size());
      const std::size_t own_bytes = own.count() * width;
      char* parts = scratch(own_bytes * ranks());
      std::vector<Piece> send, receive;
      for (int r = 0; r < size(); ++r) {
        const Span share = share_of(count, r, size());
        send.push_back({base + share.begin * width, share.count() * width});
        receive.push_back({parts + static_cast<std::size_t>(r) * own_bytes, own_bytes});
      }
      exchange(send, receive);
      sum_own(parts, own.count(), dtype, base + own.begin * width, base + own.begin * width);
      exchange(std::vector<Piece>(ranks(), send[static_cast<std::size_t>(rank())]), send, 1);
    });
  }

  void all_gather(const void* data, std::size_t bytes, void* out) override {
    if (bytes == 0) return;
    guard("AllGather", [&] { gather(data, bytes, out); });
  }

  void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) override {
    const std::size_t bytes = count * reducible_size(dtype);
    if (bytes == 0) return;
    guard("ReduceScatter", [&] {
      char* parts = scratch(bytes * ranks());
      std::vector<Piece> send, receive;
      for (std::size_t r = 0; r < ranks(); ++r) {
        send.push_back({static_cast<char*>(const_cast<void*>(in)) + r * bytes, bytes});
        receive.push_back({parts + r * bytes, bytes});
      }
      exchange(send, receive);
      sum_own(parts, count, dtype, send[static_cast<std::size_t>(rank())].data, out);
    });
  }

  // Along a binomial tree, so that the root sends to few.
  void broadcast(void* data, std::size_t bytes, int root) override {
    CHECK(root >= 0 && root < size(), root);
    if (bytes == 0 || size() == 1) return;
    guard("Broadcast", [&] {
      const int self = (rank() - root + size()) % size();
      const int low =
          self == 0 ? size() : self & -self;  // the parent is self - low, children are self + 2^k below low
      std::vector<Piece> send(ranks()), receive(ranks());
      if (self != 0) {
        receive[static_cast<std::size_t>((self - low + root) % size())] = {static_cast<char*>(data), bytes};
        exchange(send, receive);
      }
      for (int step = 1; step < low && self + step < size(); step *= 2) {
        send[static_cast<std::size_t>((self + step + root) % size())] = {static_cast<char*>(data), bytes};
      }
      exchange(send, std::vector<Piece>(ranks()));
    });
  }

  void barrier() override {
    guard("Barrier", [&] {
      char mark = 0;
      gather(&mark, 1, scratch(ranks()));
    });
  }

  void abort(const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = reason;
    for (Buffer* buffer : active_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }

 private:
  struct Piece {
    char* data = nullptr;
    std::size_t bytes = 0;
  };
  // A buffer of Gloo that abort() can reach.
  class Active {
   public:
    Active(GlooCommunicator& owner, Piece piece)
        : owner_(owner), buffer_(owner.context_->createUnboundBuffer(piece.data, piece.bytes)) {
      const std::lock_guard lock(owner_.mutex_);
      if (!owner_.aborted_.empty()) throw PeerError(owner_.aborted_);
      owner_.active_.push_back(buffer_.get());
    }
    Active(const Active&) = delete;
    Active& operator=(const Active&) = delete;
    ~Active() {
      const std::lock_guard lock(owner_.mutex_);
      owner_.active_.pop_back();  // they nest
    }
    Buffer* operator->() const { return buffer_.get(); }

   private:
    GlooCommunicator& owner_;
    std::unique_ptr<Buffer> buffer_;
  };

  std::size_t ranks() const { return static_cast<std::size_t>(size()); }

  char* scratch(std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

  static std::vector<const void*> blocks(const char* base, std::size_t bytes, std::size_t count) {
    std::vector<const void*> all;
    for (std::size_t r = 0; r < count; ++r) all.push_back(base + r * bytes);
    return all;
  }
  std::vector<const void*> blocks(const char* base, std::size_t bytes) const {
    return blocks(base, bytes, ranks());
  }

  // Sums what came from the others with this rank's own part, in rank order.
  void sum_own(const char* parts, std::size_t count, DType dtype, const void* own, void* out) const {
    auto all = blocks(parts, count * reducible_size(dtype));
    all[static_cast<std::size_t>(rank())] = own;
    ordered_sum(all, count, dtype, out);
  }

  void gather(const void* data, std::size_t bytes, void* out) {
    auto* to = static_cast<char*>(out);
    std::vector<Piece> receive;
    for (std::size_t r = 0; r < ranks(); ++r) receive.push_back({to + r * bytes, bytes});
    char* own = receive[static_cast<std::size_t>(rank())].data;
    if (own != data) std::memmove(own, data, bytes);
    exchange(std::vector<Piece>(ranks(), {own, bytes}), receive);
  }

  // Sends send[r] to rank r while receiving receive[r] from it; nothing to or from itself, nothing where
  // there are no bytes.
  void exchange(const std::vector<Piece>& send, const std::vector<Piece>& receive, std::uint64_t phase = 0) {
    const std::uint64_t slot = 2 * calls_ + phase;
    const auto deadline = Clock::now() + timeout_;
    std::vector<std::unique_ptr<Active>> in, out;
    for (int offset = 1; offset < size(); ++offset) {
      const int from = (rank() - offset + size()) % size();
      const Piece& piece = receive[static_cast<std::size_t>(from)];
      if (piece.bytes == 0) continue;
      in.push_back(std::make_unique<Active>(*this, piece));
      (*in.back())->recv(from, slot);
    }
    for (int offset = 1; offset < size(); ++offset) {
      const int to = (rank() + offset) % size();
      const Piece& piece = send[static_cast<std::size_t>(to)];
      if (piece.bytes == 0) continue;
      out.push_back(std::make_unique<Active>(*this, piece));
      (*out.back())->send(to, slot);
    }
    for (auto& buffer : in) require((*buffer)->waitRecv(deadline));
    for (auto& buffer : out) require((*buffer)->waitSend(deadline));
  }

  void require(bool completed) {
    if (completed) return;
    const std::lock_guard lock(mutex_);
    throw PeerError(aborted_);
  }

  // The one place where Gloo's exceptions become ours. After a failure the connections are in an unknown
  // state.
  template <class Body>
  void guard(const char* op, const Body& body) {
    if (!failure_.empty()) throw PeerError(failure_);
    ++calls_;
    try {
      body();
    } catch (const Error& error) {
      failure_ = error.what();
      throw;
    } catch (const std::exception& error) {
      std::string text = error.what();
      if (text.find("imed out") != std::string::npos)
        text = cat("no answer within ", static_cast<double>(timeout_.count()) / 1000, " s");
      if (const auto end = text.find("] "); text.substr(0, 1) == "[" && end != std::string::npos)
        text.erase(0, end + 2);
      failure_ = cat(op, " failed: ", text);
      throw PeerError(failure_);
    }
  }

  onnxddp::Store& store_;
  const std::string scope_;
  const milliseconds timeout_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::uint64_t calls_ = 0;  // equal on all ranks: messages of different calls never meet
  std::vector<char> scratch_;
  std::string failure_;  // of an earlier collective
  std::mutex mutex_;
  std::string aborted_;
  std::vector<Buffer*> active_;
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(const CommunicatorOptions& options,
                                                     const std::string& scope) {
  return std::make_unique<GlooCommunicator>(options, scope);
}

}  // namespace onnxddp

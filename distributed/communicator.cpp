#include "distributed/communicator.h"

#include <cstring>

#include "distributed/backends.h"
#include "distributed/heartbeat.h"
#include "distributed/reduce.h"

namespace onnxddp {
namespace {

// One rank: every collective is the identity.
class SoloCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce(void*, std::size_t, DType dtype) override { reducible_size(dtype); }
  void all_gather(const void* data, std::size_t bytes, void* out) override { copy(data, bytes, out); }
  void reduce_scatter(const void* in, std::size_t count, DType dtype, void* out) override {
    copy(in, count * reducible_size(dtype), out);
  }
  void broadcast(void*, std::size_t, int root) override { CHECK(root == 0, root); }
  void barrier() override {}

 private:
  static void copy(const void* from, std::size_t bytes, void* to) {
    if (bytes > 0) std::memmove(to, from, bytes);
  }
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options) {
  CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size, options.rank, " of ", options.size);
  if (options.backend != "auto" && options.backend != "gloo" && options.backend != "thread") {
    throw usage_error(cat("unknown communicator '", options.backend, "'")).hint("auto, gloo or thread");
  }
  if (options.size == 1 && options.backend != "gloo") return std::make_unique<SoloCommunicator>();
  CHECK(options.backend != "thread", "ranks that are threads are made by run_ranks");
  CHECK(options.store != nullptr, "ranks of several processes need a store");
  auto communicator = make_gloo_communicator(options);
  if (options.heartbeat.count() == 0) return communicator;
  HeartbeatOptions heartbeat;
  heartbeat.rank = options.rank;
  heartbeat.size = options.size;
  heartbeat.interval = options.heartbeat;
  return with_heartbeat(std::move(communicator), *options.store, heartbeat);
}

}  // namespace onnxddp

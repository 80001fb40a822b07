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

static std::unique_ptr<Communicator> make_processes(const CommunicatorOptions& options) {
  CHECK(options.store != nullptr, "ranks of several processes need a store");
  // Every rank makes its communicators in the same order.
  const std::string scope = cat("c", options.store->add(cat("communicators/", options.rank), 1));
  if (options.backend != "gloo") {
    if (auto communicator = try_shm_communicator(options, scope)) return communicator;
    if (options.backend == "shm") throw usage_error("communicator 'shm' needs all ranks on one machine");
  }
  return make_gloo_communicator(options, scope);
}

std::unique_ptr<Communicator> make_communicator(const CommunicatorOptions& options) {
  CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size, options.rank, " of ",
        options.size);
  if (options.backend == "auto" && options.size == 1) return std::make_unique<SoloCommunicator>();
  if (options.backend != "auto" && options.backend != "shm" && options.backend != "gloo") {
    throw usage_error(cat("unknown communicator '", options.backend, "'")).hint("auto, shm or gloo");
  }
  auto communicator = make_processes(options);
  if (options.heartbeat.count() == 0) return communicator;
  HeartbeatOptions heartbeat;
  heartbeat.rank = options.rank;
  heartbeat.size = options.size;
  heartbeat.interval = options.heartbeat;
  return with_heartbeat(std::move(communicator), *options.store, heartbeat);
}

}  // namespace onnxddp

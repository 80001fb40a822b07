// The host as a device.
#include "executor/device.h"

#include <omp.h>

#include <cstring>
#include <new>

#include "executor/kernel.h"
#include "executor/operands.h"

namespace onnxddp {
namespace {

constexpr std::align_val_t kAlignment{kSlotAlignment};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int threads) : threads_(threads) {
    if (threads < 1) throw usage_error(cat("--threads ", threads, ": a device needs at least one thread"));
    omp_set_num_threads(
        threads);  // of the calling thread; kernels that use oneDNN set it on the thread that runs them
  }
  std::string name() const override { return cat("cpu, ", threads_, threads_ == 1 ? " thread" : " threads"); }
  std::string kind() const override { return "cpu"; }
  void* allocate(std::size_t bytes) override {
    const std::size_t whole = padded(bytes);
    void* memory = ::operator new(whole == 0 ? kSlotAlignment : whole, kAlignment, std::nothrow);
    if (!memory)
      throw Error(cat("out of memory: ", bytes >> 20, " MiB were asked for"))
          .hint("a smaller --batch-size needs less");
    std::memset(memory, 0, whole);
    return memory;
  }
  void free(void* memory) override { ::operator delete(memory, kAlignment); }
  void upload(void* device, const void* host, std::size_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { copy(host, device, bytes); }
  const KernelTable& kernels() const override { return cpu_kernels(); }
  int threads() const override { return threads_; }

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  int threads_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(int threads) { return std::make_unique<CpuDevice>(threads); }

}  // namespace onnxddp

// What a device is and how fast it copies, multiplies and convolves: one JSON line a figure, for scripts/gpu_check.sh.
//   figures DESCRIPTION_FILE [--small]     writes cuDNN's description of the device to the file; --small: for the emulator
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>

#include "executor/cuda/blas.h"
#include "executor/cuda/conv.h"
#include "executor/cuda/runtime.h"
#include "executor/cuda/status.h"

namespace onnxddp::cuda {
namespace {

bool small = false;

/// Milliseconds of one call of `body`, by events around several.
double milliseconds(CudaDevice& device, const std::function<void()>& body) {
  const int warm = small ? 1 : 10, timed = small ? 2 : 50;
  for (int i = 0; i < warm; ++i) body();
  StreamEvent begin(true), end(true);
  begin.record(device.compute().get());
  for (int i = 0; i < timed; ++i) body();
  end.record(device.compute().get());
  end.synchronize();
  return double{end.milliseconds_since(begin)} / timed;
}

void print_versions(const CudaDevice& device) {
  int driver = 0, runtime = 0, nccl = 0;
  CUDA_OK(cudaDriverGetVersion(&driver));
  CUDA_OK(cudaRuntimeGetVersion(&runtime));
  CUDA_OK(ncclGetVersion(&nccl));
  std::printf("{\"check\": \"device\", \"ok\": true, \"name\": \"%s\", \"driver\": %d, \"runtime\": %d, \"cudnn\": %zu, \"nccl\": %d}\n",
              device.name().c_str(), driver, runtime, Cudnn::version(), nccl);
}

void dump_description(const CudaDevice& device, const std::string& path) {
  std::ofstream file(path);
  file << device.lane().cudnn->description();
  file.close();
  std::printf("{\"check\": \"cudnn_description\", \"ok\": %s, \"file\": \"%s\"}\n", file ? "true" : "false", path.c_str());
  if (!file) throw Error("cannot write " + path);
}

void copy_bandwidth(CudaDevice& device) {
  const std::size_t bytes = std::size_t{1} << (small ? 16 : 30);
  DeviceMemory from(bytes), to(bytes);
  CUDA_OK(cudaMemsetAsync(from.get(), 0, bytes, device.compute().get()));
  const double ms = milliseconds(device, [&] {
    CUDA_OK(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice, device.compute().get()));
  });
  std::printf("{\"check\": \"copy\", \"ok\": true, \"bytes\": %zu, \"gb_per_s\": %.1f}\n", bytes, 2e-6 * static_cast<double>(bytes) / ms);
}

void multiply(CudaDevice& device, const char* name, DType dtype, FloatMath math) {
  const std::int64_t n = small ? 16 : 8192;
  Product p;
  p.m = p.n = p.k = n;
  p.dtype = p.result = dtype;
  const auto bytes = static_cast<std::size_t>(n * n) * dtype_size(dtype);
  DeviceMemory a(bytes), b(bytes), c(bytes);
  CUDA_OK(cudaMemsetAsync(a.get(), 0, bytes, device.compute().get()));
  CUDA_OK(cudaMemsetAsync(b.get(), 0, bytes, device.compute().get()));
  Blas& blas = *device.lane().blas;
  blas.set_math(math);
  const double ms = milliseconds(device, [&] { blas.multiply(p, a.get(), b.get(), c.get()); });
  const double size = static_cast<double>(n);
  std::printf("{\"check\": \"gemm_%s\", \"ok\": true, \"size\": %d, \"tflop_per_s\": %.2f}\n", name, static_cast<int>(n), 2e-9 * size * size * size / ms);
}

void convolve(CudaDevice& device, const char* name, ConvKind kind) {
  ConvProblem p;
  p.kind = kind;
  p.dtype = DType::bf16;
  p.n = small ? 1 : 64;
  p.c = p.k = small ? 4 : 128;
  p.h = p.w = small ? 5 : 28;
  p.r = p.s = 3;
  p.top = p.left = p.bottom = p.right = 1;
  const ConvPlan plan = ConvPlan::build(*device.lane().cudnn, p, {});
  const auto image = static_cast<std::size_t>(p.n * p.c * p.h * p.w) * 2, weight = static_cast<std::size_t>(p.k * p.c * p.r * p.s) * 2;
  DeviceMemory first(image), second(kind == ConvKind::weight_grad ? image : weight), result(kind == ConvKind::weight_grad ? weight : image), workspace(plan.workspace_bytes());
  for (DeviceMemory* m : {&first, &second}) CUDA_OK(cudaMemsetAsync(m->get(), 0, m->bytes(), device.compute().get()));
  const double ms = milliseconds(device, [&] { plan.run(*device.lane().cudnn, first.get(), second.get(), result.get(), workspace.get()); });
  const double flops = 2.0 * static_cast<double>(p.n * p.k * p.out_h() * p.out_w()) * static_cast<double>(p.c * p.r * p.s);
  std::printf("{\"check\": \"conv_bf16_%s\", \"ok\": true, \"workspace\": %zu, \"tflop_per_s\": %.2f}\n", name, plan.workspace_bytes(), 1e-9 * flops / ms);
}

void run(const std::string& description) {
  std::string reason;
  if (device_count(&reason) == 0) throw Error("no device: " + reason);
  CudaDevice device("cuda", 0);
  print_versions(device);
  dump_description(device, description);
  copy_bandwidth(device);
  multiply(device, "f32", DType::f32, FloatMath::strict);
  multiply(device, "tf32", DType::f32, FloatMath::tf32);
  multiply(device, "bf16", DType::bf16, FloatMath::strict);
  convolve(device, "forward", ConvKind::forward);
  convolve(device, "data_grad", ConvKind::data_grad);
  convolve(device, "weight_grad", ConvKind::weight_grad);
}

}  // namespace
}  // namespace onnxddp::cuda

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: figures DESCRIPTION_FILE [--small]\n");
    return 2;
  }
  onnxddp::cuda::small = argc > 2 && std::string(argv[2]) == "--small";
  try {
    onnxddp::cuda::run(argv[1]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "figures: %s\n", e.what());
    return 1;
  }
  return 0;
}

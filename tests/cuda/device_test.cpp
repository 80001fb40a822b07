// Owners of CUDA's objects, statuses as errors, the module's device.
#include <cstring>

#include "distributed/communicator.h"
#include "executor/cuda/blas.h"
#include "executor/cuda/kernel_table.h"
#include "tests/cuda/device_case.h"

namespace onnxddp::cuda {
namespace {

using testing::Test;

template <class E, class F>
std::string message_of(const F& body) {
  try {
    body();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Status, NamesTheCallAndTheStatus) {
  CUDA_OK(cudaSuccess);
  EXPECT_TRUE(contains(message_of<Error>([] { CUDA_OK(cudaErrorInvalidValue); }), "cudaErrorInvalidValue"));
  EXPECT_TRUE(contains(message_of<Error>([] { CUDA_OK(CUBLAS_STATUS_NOT_SUPPORTED); }), "cuBLAS status 15"));
  EXPECT_TRUE(contains(message_of<Error>([] { CUDA_OK(CUDNN_STATUS_BAD_PARAM); }), "cuDNN status 2000"));
  EXPECT_TRUE(contains(message_of<PeerError>([] { CUDA_OK(ncclRemoteError); }), "NCCL status 6"));
}

TEST(Status, TooLittleMemoryHasAHint) {
  EXPECT_TRUE(
      contains(message_of<Error>([] { CUDA_OK(cudaErrorMemoryAllocation); }), "too little free memory"));
}

class Owners : public DeviceTest {};
INSTANTIATE_DEVICE_TESTS(Owners);

TEST_P(Owners, DeviceMemoryIsZeroAndCopiesBothWays) {
  void* memory = device_->allocate(1000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
  std::vector<unsigned char> bytes(1000, 7);
  device_->download(bytes.data(), memory, bytes.size());
  EXPECT_EQ(bytes, std::vector<unsigned char>(1000, 0));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i);
  std::vector<unsigned char> back(1000);
  device_->upload(memory, bytes.data(), bytes.size());
  device_->download(back.data(), memory, back.size());
  EXPECT_EQ(back, bytes);
  device_->free(memory);
  EXPECT_EQ(device_->kind(), "cuda");
  EXPECT_EQ(device_->name().rfind("cuda:0, ", 0), 0u);
}

TEST_P(Owners, AStreamWaitsForAnEventOfAnother) {
  PinnedMemory in(4096), out(4096);
  DeviceMemory memory(4096);
  std::memset(in.get(), 42, 4096);
  StreamEvent arrived;
  CUDA_OK(cudaMemcpyAsync(memory.get(), in.get(), 4096, cudaMemcpyHostToDevice, device_->transfer().get()));
  arrived.record(device_->transfer().get());
  device_->compute().wait(arrived);
  CUDA_OK(cudaMemcpyAsync(out.get(), memory.get(), 4096, cudaMemcpyDeviceToHost, device_->compute().get()));
  device_->compute().synchronize();
  EXPECT_EQ(out.as<unsigned char>()[4095], 42);
  arrived.synchronize();
}

TEST_P(Owners, EventsWithTimingTellADuration) {
  StreamEvent begin(true), end(true);
  begin.record(device_->compute().get());
  end.record(device_->compute().get());
  end.synchronize();
  EXPECT_GE(end.milliseconds_since(begin), 0);
}

TEST_P(Owners, AGraphReplaysForkedWork) {
  DeviceMemory a = on_device<float>({1, 2, 3, 4}), b(16);
  StreamEvent forked, joined;
  const WorkGraph graph = WorkGraph::capture(device_->compute().get(), [&] {
    forked.record(device_->compute().get());
    device_->comm().wait(forked);
    CUDA_OK(cudaMemcpyAsync(b.get(), a.get(), 16, cudaMemcpyDeviceToDevice, device_->comm().get()));
    joined.record(device_->comm().get());
    device_->compute().wait(joined);
    CUDA_OK(cudaMemsetAsync(a.get(), 0, 16, device_->compute().get()));
  });
  EXPECT_EQ(from_device<float>(a), (std::vector<float>{1, 2, 3, 4}));  // nothing has run
  graph.launch(device_->compute().get());
  EXPECT_EQ(from_device<float>(b), (std::vector<float>{1, 2, 3, 4}));
  graph.launch(device_->compute().get());
  EXPECT_EQ(from_device<float>(b), (std::vector<float>{0, 0, 0, 0}));
}

TEST_P(Owners, AFailedCaptureLeavesTheStreamUsable) {
  EXPECT_EQ(
      message_of<Error>([&] { WorkGraph::capture(device_->compute().get(), [] { throw Error("body"); }); }),
      "body");
  DeviceMemory memory(16);
  CUDA_OK(cudaMemsetAsync(memory.get(), 0, 16, device_->compute().get()));
  device_->compute().synchronize();
}

TEST_P(Owners, LanesOfTheDeviceHaveTheirStreams) {
  using Which = onnxddp::Lane;
  for (const auto& [which, stream] :
       {std::pair(Which::compute, &device_->compute()), std::pair(Which::comm, &device_->comm()),
        std::pair(Which::copy, &device_->transfer())}) {
    device_->on_lane(which, [&, wanted = stream->get()] { EXPECT_EQ(current_lane().stream, wanted); });
  }
  EXPECT_THROW(current_lane(), InternalError);
}

TEST(Lanes, NestAndMustBeThere) {
  EXPECT_THROW(current_lane(), InternalError);
  const LaneScope outer(Lane{reinterpret_cast<cudaStream_t>(1), nullptr, nullptr});
  {
    const LaneScope inner(Lane{reinterpret_cast<cudaStream_t>(2), nullptr, nullptr});
    EXPECT_EQ(current_lane().stream, reinterpret_cast<cudaStream_t>(2));
  }
  EXPECT_EQ(current_lane().stream, reinterpret_cast<cudaStream_t>(1));
}

class Table : public DeviceTest {};
INSTANTIATE_DEVICE_TESTS(Table);

/// Place of the matrix of batch `index` of the result in an operand whose batch axes may be broadcast.
std::int64_t batch_place(std::int64_t index, const Ints& result, const Ints& operand) {
  std::int64_t place = 0, step = 1;
  for (std::size_t back = 3; back <= result.size(); ++back) {
    const std::int64_t size = result[result.size() - back];
    if (back <= operand.size()) {
      const std::int64_t own = operand[operand.size() - back];
      if (own != 1) place += index % size * step;
      step *= own;
    }
    index /= size;
  }
  return place;
}

TEST_P(Table, MatMulBroadcasts) {
  struct {
    Ints a, b, y;
  } const cases[] = {{{2, 3}, {3, 4}, {2, 4}},
                     {{2, 5, 2, 3}, {2, 5, 3, 4}, {2, 5, 2, 4}},
                     {{5, 2, 3}, {2, 1, 3, 4}, {2, 5, 2, 4}},
                     {{2, 2, 3}, {3, 4}, {2, 2, 4}},
                     {{2, 3}, {2, 3, 4}, {2, 2, 4}},
                     {{2, 1, 2, 3}, {5, 3, 4}, {2, 5, 2, 4}},
                     {{0, 3}, {3, 4}, {0, 4}},
                     {{0, 2, 3}, {3, 4}, {0, 2, 4}}};
  const LaneScope scope(device_->lane());
  for (const auto& [a_shape, b_shape, y_shape] : cases) {
    SCOPED_TRACE(numel(a_shape));
    const std::vector<float> a = random_floats(numel(a_shape), 1), b = random_floats(numel(b_shape), 2);
    std::vector<float> expected(static_cast<std::size_t>(numel(y_shape)));
    const std::int64_t m = a_shape[a_shape.size() - 2], k = a_shape.back(), n = b_shape.back();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i), row = at / n % m, col = at % n, batch = at / (m * n);
      const std::int64_t from_a = batch_place(batch, y_shape, a_shape) * m * k,
                         from_b = batch_place(batch, y_shape, b_shape) * k * n;
      for (std::int64_t l = 0; l < k; ++l)
        expected[i] += a[static_cast<std::size_t>(from_a + row * k + l)] *
                       b[static_cast<std::size_t>(from_b + l * n + col)];
    }
    const Graph graph;
    const Node node;
    PlanContext context(graph, node, {{DType::f32, a_shape}, {DType::f32, b_shape}}, {{DType::f32, y_shape}},
                        1);
    DeviceMemory da = on_device(a), db = on_device(b), dy(expected.size() * 4);
    const void* in[] = {da.get(), db.get()};
    void* out[] = {dy.get()};
    device_->kernels().find("MatMul", DType::f32)->prepare(context)({in, out, nullptr, nullptr});
    expect_close(from_device<float>(dy), expected, 1e-6);
  }
}

}  // namespace
}  // namespace onnxddp::cuda

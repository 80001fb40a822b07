// Plans that run: against plain loops, from a cache file, under options.
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "executor/cuda/conv.h"
#include "tests/cuda/device_case.h"

namespace onnxddp::cuda {
namespace {

/// All products of a convolution: f(x, w, y) with the places in NHWC, KRSC, NHWC.
template <class F>
void products(const ConvProblem& p, const F& f) {
  const std::int64_t per = p.c / p.group, outs = p.k / p.group;
  for (std::int64_t n = 0; n < p.n; ++n)
    for (std::int64_t k = 0; k < p.k; ++k)
      for (std::int64_t y = 0; y < p.out_h(); ++y)
        for (std::int64_t x = 0; x < p.out_w(); ++x)
          for (std::int64_t r = 0; r < p.r; ++r)
            for (std::int64_t s = 0; s < p.s; ++s) {
              const std::int64_t row = y * p.stride_h - p.top + r * p.dilation_h, col = x * p.stride_w - p.left + s * p.dilation_w;
              if (row < 0 || row >= p.h || col < 0 || col >= p.w) continue;
              for (std::int64_t c = 0; c < per; ++c)
                f(static_cast<std::size_t>(((n * p.h + row) * p.w + col) * p.c + k / outs * per + c),
                  static_cast<std::size_t>(((k * p.r + r) * p.s + s) * per + c),
                  static_cast<std::size_t>(((n * p.out_h() + y) * p.out_w() + x) * p.k + k));
            }
}

struct Case {
  std::vector<float> first, second, expected;
};
Case make_case(const ConvProblem& p) {
  const std::vector<float> x = random_floats(p.n * p.c * p.h * p.w, 1), w = random_floats(p.k * (p.c / p.group) * p.r * p.s, 2);
  const std::vector<float> y = random_floats(p.n * p.k * p.out_h() * p.out_w(), 3);
  Case c;
  if (p.kind == ConvKind::forward) {
    c = {x, w, std::vector<float>(y.size())};
    products(p, [&](std::size_t i, std::size_t j, std::size_t k) { c.expected[k] += x[i] * w[j]; });
  } else if (p.kind == ConvKind::data_grad) {
    c = {y, w, std::vector<float>(x.size())};
    products(p, [&](std::size_t i, std::size_t j, std::size_t k) { c.expected[i] += y[k] * w[j]; });
  } else {
    c = {y, x, std::vector<float>(w.size())};
    products(p, [&](std::size_t i, std::size_t j, std::size_t k) { c.expected[j] += y[k] * x[i]; });
  }
  return c;
}

ConvProblem odd(ConvKind kind) {  // strides, pads that differ
  ConvProblem p;
  p.kind = kind;
  p.n = 2, p.c = 4, p.h = 7, p.w = 6, p.k = 8, p.r = 3, p.s = 2;
  p.top = p.bottom = p.left = p.right = 1;
  p.stride_h = 2;
  return p;
}
ConvProblem grouped(ConvKind kind) {
  ConvProblem p;
  p.kind = kind;
  p.n = 1, p.c = 8, p.h = p.w = 5, p.k = 16, p.r = p.s = 3, p.group = 2;
  p.top = p.left = p.bottom = p.right = 1;
  return p;
}

class Convolutions : public DeviceTest {
 protected:
  void check(const ConvPlan& plan, const ConvProblem& p) {
    SCOPED_TRACE(describe(p, {}));
    const Case c = make_case(p);
    DeviceMemory first = on_device(c.first), second = on_device(c.second), result(c.expected.size() * 4), workspace(plan.workspace_bytes());
    plan.run(*device_->lane().cudnn, first.get(), second.get(), result.get(), workspace.get());
    expect_close(from_device<float>(result), c.expected, 1e-5);
  }
};
INSTANTIATE_DEVICE_TESTS(Convolutions);

TEST_P(Convolutions, EqualPlainLoops) {
  for (const ConvKind kind : {ConvKind::forward, ConvKind::data_grad, ConvKind::weight_grad})
    for (const ConvProblem& p : {odd(kind), grouped(kind)}) check(ConvPlan::build(*device_->lane().cudnn, p, {}), p);
}

TEST_P(Convolutions, OptionsChooseTheEngine) {
  Cudnn& cudnn = *device_->lane().cudnn;
  const ConvPlan strict = ConvPlan::build(cudnn, odd(ConvKind::forward), {});
  for (const cudnnBackendNumericalNote_t note : strict.notes()) {
    EXPECT_NE(note, CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
    EXPECT_NE(note, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
  }
#if !defined(CUDAEMU_REAL_DEVICE)  // its engines are known
  ConvOptions options;
  options.math = FloatMath::tf32;
  options.deterministic = false;
  EXPECT_EQ(ConvPlan::build(cudnn, odd(ConvKind::forward), options).notes().size(), 2u);
  options = {};
  options.workspace_limit = 1000;
  EXPECT_EQ(ConvPlan::build(cudnn, odd(ConvKind::forward), options).workspace_bytes(), 256u);
  options.workspace_limit = 100;
  EXPECT_THROW(ConvPlan::build(cudnn, odd(ConvKind::forward), options), Error);
#endif
}

TEST_P(Convolutions, PlansComeBackFromAFile) {
  Cudnn& cudnn = *device_->lane().cudnn;
  const std::string path = testing::TempDir() + "plans" + std::to_string(getpid());
  const ConvProblem p = odd(ConvKind::forward);
  ConvPlanCache first;
  first.load(path);  // nothing there
  check(first.get(cudnn, p, {}), p);
  EXPECT_EQ(first.hits(), 0);
  first.save(path);
  ConvPlanCache second;
  second.load(path);
  check(second.get(cudnn, p, {}), p);
  EXPECT_EQ(second.hits(), 1);
  ConvOptions other;
  other.workspace_limit /= 2;  // another key
  second.get(cudnn, p, other);
  EXPECT_EQ(second.hits(), 1);
  EXPECT_EQ(second.size(), 2u);
  std::remove(path.c_str());
}

TEST(PlanCache, RefusesADamagedFile) {
  const std::string path = testing::TempDir() + "damaged" + std::to_string(getpid());
  for (const char* text : {"", "something else\n", "onnx-ddp convolution plans 1\n5 99999999999\nkey", "onnx-ddp convolution plans 1\n3 9\nkeyplan\n"}) {
    std::ofstream(path) << text;
    ConvPlanCache cache;
    EXPECT_THROW(cache.load(path), Error) << text;
  }
  std::remove(path.c_str());
}

TEST(PlanCache, AForeignPlanIsNotLoaded) {
#if defined(CUDAEMU_REAL_DEVICE)
  GTEST_SKIP() << "needs no device, but the emulated library";
#else
  Cudnn described(std::string("{\"deviceName\": \"none\"}"));
  EXPECT_FALSE(ConvPlan::load(described, "nonsense", 1 << 20).has_value());
  EXPECT_EQ(described.description(), "{\"deviceName\": \"none\"}");
#endif
}

}  // namespace
}  // namespace onnxddp::cuda

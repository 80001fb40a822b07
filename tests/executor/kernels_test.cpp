// Kernels of the CPU: small cases with literal results, errors, and oneDNN against the reference loops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "distributed/communicator.h"
#include "executor/device.h"
#include "executor/philox.h"
#include "executor/scalar_ops.h"
#include "graph/op.h"
#include "tests/executor/kernel_case.h"

namespace onnxddp {
namespace {

using testing::difference;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::random_inputs;
using testing::random_tensor;
using testing::run_node;
using testing::run_text;

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();

HostTensor f32(Ints shape, const std::vector<float>& values) {
  return HostTensor::of<float>(std::move(shape), values);
}
HostTensor i64(Ints shape, const std::vector<std::int64_t>& values) {
  return HostTensor::of<std::int64_t>(std::move(shape), values);
}

template <class T>
std::vector<T> values(const HostTensor& t) {
  return std::vector<T>(t.data<T>(), t.data<T>() + t.numel());
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// ---- scalar functions

/// Largest error in units of the last place over floats of all magnitudes in [low, high].
template <class F, class G>
double worst_ulp(F f, G exact, float low, float high) {
  double worst = 0;
  std::mt19937 random(1);
  for (int i = 0; i < 400000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const float x = __builtin_bit_cast(float, bits);
    if (!(x >= low && x <= high)) continue;
    const double want = exact(static_cast<double>(x)), got = static_cast<double>(f(x));
    const float near = std::abs(static_cast<float>(want));
    if (std::isinf(near)) {
      EXPECT_EQ(f(x), static_cast<float>(want)) << x;
      continue;
    }
    worst = std::max(worst, std::abs(got - want) / static_cast<double>(std::nextafter(near, kInf) - near));
  }
  return worst;
}

TEST(Scalar, FunctionsAreWithinTheirErrors) {
  constexpr float most = std::numeric_limits<float>::max();
  EXPECT_LE(worst_ulp(
                scalar::Exp(), [](double x) { return std::exp(x); }, -most, most),
            1.1);
  EXPECT_LE(worst_ulp(
                scalar::Log(), [](double x) { return std::log(x); }, 0, most),
            2.0);
  EXPECT_LE(worst_ulp(
                scalar::Tanh(), [](double x) { return std::tanh(x); }, -most, most),
            2.5);
  EXPECT_LE(worst_ulp(
                scalar::Erf(), [](double x) { return std::erf(x); }, -most, most),
            2.0);
  EXPECT_LE(worst_ulp(
                scalar::Sigmoid(), [](double x) { return 1 / (1 + std::exp(-x)); }, -87, most),
            2.5);
}

TEST(Scalar, FunctionsAtTheEdges) {
  EXPECT_EQ(scalar::exp(kInf), kInf);
  EXPECT_EQ(scalar::exp(-kInf), 0.0f);
  EXPECT_EQ(scalar::exp(0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(scalar::exp(kNan)));
  EXPECT_EQ(scalar::log(0.0f), -kInf);
  EXPECT_EQ(scalar::log(kInf), kInf);
  EXPECT_EQ(scalar::log(1.0f), 0.0f);
  EXPECT_TRUE(std::isnan(scalar::log(-1.0f)) && std::isnan(scalar::log(kNan)));
  EXPECT_EQ(scalar::tanh(-kInf), -1.0f);
  EXPECT_TRUE(std::isnan(scalar::tanh(kNan)));
  EXPECT_EQ(scalar::erf(kInf), 1.0f);
  EXPECT_TRUE(std::isnan(scalar::erf(kNan)));
  EXPECT_EQ(scalar::Sigmoid()(-kInf), 0.0f);
  EXPECT_TRUE(std::isnan(scalar::Relu()(kNan)) && std::isnan(scalar::Max()(1.0f, kNan)) &&
              std::isnan(scalar::Min()(kNan, 1.0f)));
}

TEST(Scalar, IntegersNeverTrap) {
  constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min();
  const scalar::Div div;
  EXPECT_EQ(div(std::int64_t{-7}, std::int64_t{2}), -3);
  EXPECT_EQ(div(std::int64_t{7}, std::int64_t{0}), 0);
  EXPECT_EQ(div(least, std::int64_t{-1}), least);
  EXPECT_EQ(div(std::int32_t{9}, std::int32_t{-4}), -2);
}

// ---- Philox

std::vector<std::uint32_t> words(const Philox& p) { return {p.word[0], p.word[1], p.word[2], p.word[3]}; }

TEST(Philox, KnownAnswers) {  // of the authors' library (Random123, kat_vectors)
  EXPECT_THAT(words(philox(0, 0, 0, 0, 0)), ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  EXPECT_THAT(words(philox(~0u, ~0u, ~0u, ~0u, ~0ull)),
              ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
  EXPECT_THAT(words(philox(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0x299f31d0a4093822ull)),
              ElementsAre(0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

std::vector<HostTensor> drop(const HostTensor& x, std::int64_t rank, std::int64_t world, bool batch,
                             int threads = 1) {
  const std::string type = cat("f32", shape_str(x.shape()));
  return run_text(cat("Dropout(", type, ", i64[5]=[7,3,0,", rank, ",", world,
                      "]) {ratio=0.25, key=11, batch=", batch ? 1 : 0, "}"),
                  {x}, {.threads = threads});
}

TEST(Dropout, ScalesWhatItKeeps) {
  const HostTensor x = HostTensor::full(DType::f32, {100, 1000}, 3.0);
  const auto y = drop(x, 0, 1, true);
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    kept += y[1].as_int(i);
    EXPECT_EQ(y[0].as_double(i), y[1].as_int(i) ? 4.0 : 0.0);
  }
  EXPECT_NEAR(static_cast<double>(kept), 75000, 600);
  EXPECT_EQ(drop(x, 0, 1, true, 4)[1], y[1]);
}

TEST(Dropout, RanksTogetherDropWhatOneRankDrops) {
  const HostTensor whole = random_tensor(DType::f32, {6, 7}, 1), part = random_tensor(DType::f32, {3, 7}, 2);
  const auto one = drop(whole, 0, 1, true)[1], even = drop(part, 0, 2, true)[1],
             odd = drop(part, 1, 2, true)[1];
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t i = 0; i < 7; ++i) {
      EXPECT_EQ(even.as_int(row * 7 + i), one.as_int(2 * row * 7 + i));
      EXPECT_EQ(odd.as_int(row * 7 + i), one.as_int((2 * row + 1) * 7 + i));
    }
  }
  EXPECT_NE(drop(whole, 0, 2, false)[1], drop(whole, 1, 2, false)[1]) << "without a batch the ranks differ";
}

TEST(Dropout, BulkAndSingleElementsAgree) {
  const std::int64_t state[5] = {7, 3, 0, 1, 2};
  const HostTensor x = random_tensor(DType::f32, {5, 301}, 1);
  const auto mask = drop(x, 1, 2, true)[1];
  const DropoutBits bits = DropoutBits::from(state, 11, 0.25, 301);
  for (std::int64_t i = 0; i < x.numel(); ++i) ASSERT_EQ(mask.as_int(i) != 0, bits.keep(i)) << i;
}

// ---- elementwise

TEST(Elementwise, BroadcastsLikeNumpy) {
  EXPECT_THAT(values<float>(run_text("Add(f32[2,3], f32[3])",
                                     {f32({2, 3}, {1, 2, 3, 4, 5, 6}), f32({3}, {10, 20, 30})})[0]),
              ElementsAre(11, 22, 33, 14, 25, 36));
  EXPECT_THAT(
      values<float>(run_text("Sub(f32[2,1], f32[1,3])", {f32({2, 1}, {1, 2}), f32({1, 3}, {10, 20, 30})})[0]),
      ElementsAre(-9, -19, -29, -8, -18, -28));
  EXPECT_THAT(values<float>(run_text("Mul(f32[], f32[3])", {f32({}, {2}), f32({3}, {1, 2, 3})})[0]),
              ElementsAre(2, 4, 6));
  EXPECT_THAT(values<std::int64_t>(run_text("Div(i64[3], i64[])", {i64({3}, {7, -7, 9}), i64({}, {2})})[0]),
              ElementsAre(3, -3, 4));
}

TEST(Elementwise, EmptyTensorsAreFine) {
  EXPECT_EQ(run_text("Add(f32[0,3], f32[3])", {f32({0, 3}, {}), f32({3}, {1, 2, 3})})[0].numel(), 0);
  EXPECT_EQ(run_text("Relu(f32[2,0])", {f32({2, 0}, {})})[0].numel(), 0);
  EXPECT_THAT(values<float>(run_text("ReduceSum(f32[0,2]) {axes=[0]}", {f32({0, 2}, {})})[0]),
              ElementsAre(0, 0));
}

TEST(Elementwise, CastTruncatesAndStaysInRange) {
  const auto x = f32({6}, {1.9f, -1.9f, 3e9f, -3e9f, kNan, kInf});
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max(),
                         least = std::numeric_limits<std::int32_t>::min();
  EXPECT_THAT(values<std::int32_t>(run_text("Cast(f32[6]) {to=\"i32\"}", {x})[0]),
              ElementsAre(1, -1, most, least, 0, most));
  EXPECT_THAT(
      values<bool>(run_text("Cast(f32[6]) {to=\"bool\"}", {f32({6}, {0, 1, -0.0f, 0.5f, kNan, 2})})[0]),
      ElementsAre(false, true, false, true, true, true));
}

TEST(Elementwise, SplitsOverThreads) {
  const HostTensor x = random_tensor(DType::f32, {200001}, 1), y = random_tensor(DType::f32, {200001}, 2);
  EXPECT_EQ(run_text("Mul(f32[200001], f32[200001])", {x, y}, {.threads = 3})[0],
            run_text("Mul(f32[200001], f32[200001])", {x, y})[0]);
  EXPECT_EQ(run_text("Exp(f32[200001])", {x}, {.threads = 3})[0], run_text("Exp(f32[200001])", {x})[0]);
}

// ---- reductions

TEST(Reduce, AxesAndKeepdims) {
  const auto x = f32({2, 3}, {1, 2, 3, 4, 5, 6});
  EXPECT_THAT(values<float>(run_text("ReduceSum(f32[2,3]) {axes=[0]}", {x})[0]), ElementsAre(5, 7, 9));
  EXPECT_THAT(values<float>(run_text("ReduceMean(f32[2,3]) {axes=[1]}", {x})[0]), ElementsAre(2, 5));
  EXPECT_THAT(values<float>(run_text("ReduceMax(f32[2,3]) {axes=[0,1], keepdims=0}", {x})[0]),
              ElementsAre(6));
  EXPECT_THAT(
      values<std::int64_t>(run_text("ArgMax(f32[2,3]) {axis=1}", {f32({2, 3}, {1, 3, 3, 2, 2, 1})})[0]),
      ElementsAre(1, 0));
}

TEST(Reduce, LongSumsKeepTheirDigits) {
  const std::int64_t n = 3'000'000;
  const HostTensor x = HostTensor::full(DType::f32, {n}, 0.1);
  const double exact = static_cast<double>(0.1f) * static_cast<double>(n);
  EXPECT_NEAR(run_text("ReduceSum(f32[3000000]) {axes=[0]}", {x})[0].as_double(0), exact, exact * 1e-7);
  EXPECT_NEAR(run_text("SumTo(f32[1500000,2]) {shape=[2]}", {x.reshaped({n / 2, 2})})[0].as_double(1),
              exact / 2, exact * 1e-7);
  EXPECT_NEAR(run_text("SumSquares(f32[3000000])", {x})[0].as_double(0), exact * static_cast<double>(0.1f),
              exact * 1e-8);
}

// ---- losses

TEST(Loss, CrossEntropySumsTheKeptRows) {
  const auto x = f32({3, 2}, {0, 0, 1000, 0, 0, 1000});
  const auto loss =
      run_text("CrossEntropyLoss(f32[3,2], i64[3]) {ignore_index=-1}", {x, i64({3}, {1, -1, 0})})[0];
  EXPECT_FLOAT_EQ(static_cast<float>(loss.as_double(0)), std::log(2.0f) + 1000.0f);
  const auto grad = run_text("CrossEntropyLossGrad(f32[3,2], i64[3], f32[]) {ignore_index=-1}",
                             {x, i64({3}, {1, -1, 0}), f32({}, {2})})[0];
  EXPECT_THAT(values<float>(grad), ElementsAre(1, -1, 0, 0, -2, 2));
}

TEST(Loss, BadLabelsAreErrorsWithTheirRow) {
  const auto x = f32({3, 2}, {1, 2, 3, 4, 5, 6});
  const auto loss = [&](std::vector<std::int64_t> t) {
    return error_of([&] { run_text("CrossEntropyLoss(f32[3,2], i64[3])", {x, i64({3}, t)}); });
  };
  EXPECT_EQ(loss({0, 1, 2}), "label 2 in row 2 of the targets is not one of the 2 classes");
  EXPECT_EQ(loss({0, -1, 5}), "label -1 in row 1 of the targets is not one of the 2 classes");
}

// ---- products

void expect_equals_f64(const std::string& text, double tolerance, const testing::RunOptions& options = {}) {
  SCOPED_TRACE(text);
  const Sample narrow = parse_sample(text), wide = parse_sample(text, DType::f64);
  const auto got = run_node(narrow.graph, narrow.graph.order[0], random_inputs(narrow, 3), options);
  const auto want = run_node(wide.graph, wide.graph.order[0], random_inputs(wide, 3));
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_LE(difference(got[i], want[i]), tolerance) << "output " << i;
}

TEST(Gemm, LiteralProducts) {
  const auto a = f32({2, 2}, {1, 2, 3, 4}), b = f32({2, 2}, {5, 6, 7, 8});
  EXPECT_THAT(values<float>(run_text("Gemm(f32[2,2], f32[2,2])", {a, b})[0]), ElementsAre(19, 22, 43, 50));
  EXPECT_THAT(values<float>(run_text("Gemm(f32[2,2], f32[2,2]) {transA=1}", {a, b})[0]),
              ElementsAre(26, 30, 38, 44));
  EXPECT_THAT(values<float>(run_text("Gemm(f32[2,2], f32[2,2]) {transB=1}", {a, b})[0]),
              ElementsAre(17, 23, 39, 53));
  EXPECT_THAT(values<float>(run_text("Gemm(f32[2,2], f32[2,2], f32[2,1]) {alpha=2.0, beta=0.5}",
                                     {a, b, f32({2, 1}, {2, 4})})[0]),
              ElementsAre(39, 45, 88, 102));
  EXPECT_THAT(values<float>(
                  run_text("MatMul(f32[2,1,2], f32[2,1])", {a.reshaped({2, 1, 2}), f32({2, 1}, {1, 10})})[0]),
              ElementsAre(21, 43));
}

TEST(Gemm, EqualsTheReferenceForEveryForm) {
  for (const char* sizes : {"f32[33,47], f32[47,29]", "f32[3,4], f32[4,5]", "f32[1,4099], f32[4099,1]"}) {
    expect_equals_f64(cat("Gemm(", sizes, ")"), 1e-5);
  }
  expect_equals_f64("Gemm(f32[47,33], f32[47,29]) {transA=1}", 1e-5);
  expect_equals_f64("Gemm(f32[33,47], f32[29,47]) {transB=1}", 1e-5);
  expect_equals_f64("Gemm(f32[47,33], f32[29,47]) {transA=1, transB=1, alpha=0.5}", 1e-5);
  for (const char* addend : {"f32[29]", "f32[1,29]", "f32[33,29]", "f32[33,1]", "f32[]", "f32[1]"}) {
    expect_equals_f64(cat("Gemm(f32[33,47], f32[47,29], ", addend, ")"), 1e-5);
    expect_equals_f64(cat("Gemm(f32[33,47], f32[47,29], ", addend, ") {alpha=2.0, beta=3.0}"), 1e-5);
    expect_equals_f64(cat("Gemm(f32[33,47], f32[47,29], ", addend, ")"), 1e-5, {.threads = 2});
  }
}

TEST(Gemm, SumsOverNothingAreZero) {
  EXPECT_THAT(values<float>(run_text("MatMul(f32[1,0], f32[0,2])", {f32({1, 0}, {}), f32({0, 2}, {})})[0]),
              ElementsAre(0, 0));
  EXPECT_EQ(run_text("MatMul(f32[0,3], f32[3,2])", {f32({0, 3}, {}), random_tensor(DType::f32, {3, 2}, 1)})[0]
                .numel(),
            0);
}

TEST(MatMul, BroadcastsBatches) {
  for (const char* types :
       {"f32[3,17,31], f32[31,23]", "f32[2,3,17,31], f32[2,3,31,23]", "f32[2,1,17,31], f32[3,31,23]",
        "f32[17,31], f32[4,31,23]", "f32[2,3,2,3], f32[1,3,3,2]", "f32[5,1,1], f32[1,1,3]"}) {
    expect_equals_f64(cat("MatMul(", types, ")"), 1e-5);
  }
}

// ---- convolution

const std::vector<std::string> kConvolutions = {
    "f32[2,3,9,7], f32[5,3,3,3], f32[5]) {pads=[1,1,1,1]}",
    "f32[2,16,8,8], f32[32,16,3,3]) {strides=[2,2], pads=[1,1,1,1]}",
    "f32[1,8,11,6], f32[8,8,5,2], f32[8]) {strides=[2,1], pads=[0,1,3,0]}",
    "f32[2,8,10,9], f32[12,4,3,3]) {group=2, pads=[1,1,1,1]}",
    "f32[2,16,7,7], f32[16,1,3,3], f32[16]) {group=16, strides=[2,2], pads=[1,1,1,1]}",
    "f32[1,3,12,13], f32[4,3,3,3]) {dilations=[2,3], pads=[2,0,1,3]}",
    "f32[3,16,5,5], f32[8,16,1,1])",
    "f32[2,1,8,8], f32[8,1,3,3], f32[8]) {pads=[1,1,1,1]}",
};

TEST(Conv, LiteralWindow) {
  const auto y = run_text("Conv(f32[1,1,3,3], f32[1,1,2,2], f32[1]) {pads=[0,0,1,1]}",
                          {f32({1, 1, 3, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
                           f32({1, 1, 2, 2}, {1, 10, 100, 1000}), f32({1}, {0.5f})});
  EXPECT_THAT(values<float>(y[0]),
              ElementsAre(5421.5f, 6532.5f, 603.5f, 8754.5f, 9865.5f, 906.5f, 87.5f, 98.5f, 9.5f));
}

TEST(Conv, OneDnnEqualsTheReference) {
  for (const std::string& conv : kConvolutions) {
    for (const bool nhwc : {false, true}) {
      for (const int threads : {1, 2})
        expect_equals_f64("Conv(" + conv, 1e-5, {.nhwc = nhwc, .threads = threads});
    }
  }
}

TEST(Conv, GradientsByOneDnnEqualTheReference) {
  for (const std::string& conv : kConvolutions) {
    const Sample sample = parse_sample("Conv(" + conv);
    const Node& node = sample.graph.node(sample.graph.order[0]);
    const std::string x = sample.graph.value(node.inputs[0]).type.str(),
                      w = sample.graph.value(node.inputs[1]).type.str(),
                      y = sample.graph.value(node.outputs[0]).type.str();
    std::string attrs;
    if (const std::size_t brace = conv.find('{'); brace != std::string::npos)
      attrs = ", " + conv.substr(brace + 1, conv.size() - brace - 2);
    for (const bool nhwc : {false, true}) {
      for (const int threads : {1, 2}) {
        expect_equals_f64(cat("ConvDataGrad(", y, ", ", w, ") {shape=", x.substr(3), attrs, "}"), 1e-5,
                          {.nhwc = nhwc, .threads = threads});
        expect_equals_f64(cat("ConvWeightGrad(", y, ", ", x, ") {shape=", w.substr(3), attrs, "}"), 1e-5,
                          {.nhwc = nhwc, .threads = threads});
      }
    }
  }
}

// ---- pooling

TEST(Pool, TheFirstMaximumGetsTheGradientAndPadsNeverWin) {
  const auto x = f32({1, 1, 2, 2}, {-3, -1, -1, -2});
  EXPECT_THAT(values<float>(run_text("MaxPool(f32[1,1,2,2]) {kernel_shape=[2,2], pads=[1,1,0,0]}", {x})[0]),
              ElementsAre(-3, -1, -1, -1));
  const auto dx = run_text("MaxPoolGrad(f32[1,1,2,2], f32[1,1,2,2]) {kernel_shape=[2,2], pads=[1,1,0,0]}",
                           {f32({1, 1, 2, 2}, {1, 10, 100, 1000}), x});
  EXPECT_THAT(values<float>(dx[0]), ElementsAre(1, 1010, 100, 0));
}

TEST(Pool, AveragesCountPadsOnlyWhenAsked) {
  const auto x = f32({1, 1, 2, 2}, {4, 8, 12, 16});
  EXPECT_THAT(
      values<float>(run_text("AveragePool(f32[1,1,2,2]) {kernel_shape=[2,2], pads=[1,1,0,0]}", {x})[0]),
      ElementsAre(4, 6, 8, 10));
  EXPECT_THAT(
      values<float>(run_text(
          "AveragePool(f32[1,1,2,2]) {kernel_shape=[2,2], pads=[1,1,0,0], count_include_pad=1}", {x})[0]),
      ElementsAre(1, 3, 4, 10));
  // What ceil_mode adds beyond the padding never counts.
  EXPECT_THAT(
      values<float>(run_text(
          "AveragePool(f32[1,1,3,1]) {kernel_shape=[2,1], strides=[2,1], ceil_mode=1, count_include_pad=1}",
          {f32({1, 1, 3, 1}, {2, 4, 6})})[0]),
      ElementsAre(3, 6));
}

TEST(Pool, LargeImagesInBothLayouts) {
  for (const char* text :
       {"MaxPool(f32[3,5,17,19]) {kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]}",
        "AveragePool(f32[3,5,17,19]) {kernel_shape=[3,2], strides=[1,2]}",
        "MaxPoolGrad(f32[3,5,9,10], f32[3,5,17,19]) {kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]}"}) {
    for (const int threads : {1, 3}) expect_equals_f64(text, 1e-6, {.nhwc = true, .threads = threads});
  }
}

// ---- batch norm

TEST(BatchNorm, StatisticsSurviveALargeMean) {
  for (const bool nhwc : {false, true}) {
    HostTensor x = random_tensor(DType::f32, {4, 18, 9, 9}, 1);
    for (std::int64_t i = 0; i < x.numel(); ++i)
      x.set_double(i, static_cast<double>(static_cast<float>(x.as_double(i) + 10000.0)));
    const auto narrow = run_text("BatchStats(f32[4,18,9,9])", {x}, {.nhwc = nhwc})[0];
    const Sample wide = parse_sample("BatchStats(f32[4,18,9,9])", DType::f64);
    const auto exact = run_node(wide.graph, wide.graph.order[0], {x.cast(DType::f64)})[0];
    for (std::int64_t k = 0; k < 36; ++k) EXPECT_NEAR(narrow.as_double(k) / exact.as_double(k), 1, 1e-6) << k;
  }
}

TEST(BatchNorm, CountsBeyondFloatPrecision) {
  const std::int64_t n = (1 << 20) + 3;
  const auto stats =
      run_text(cat("BatchStats(f32[", n, ",1])"), {HostTensor::full(DType::f32, {n, 1}, 2.0)})[0];
  EXPECT_THAT(values<float>(stats), ElementsAre(2, 0, 1, 3));
}

TEST(BatchNorm, MergedPartsEqualTheWhole) {  // ranks of 3, 0 and 1 rows
  const HostTensor x = random_tensor(DType::f64, {4, 2}, 5);
  const auto stats = [](const HostTensor& part) {
    const Sample s = parse_sample(cat("BatchStats(f32", shape_str(part.shape()), ")"), DType::f64);
    return run_node(s.graph, s.graph.order[0], {part})[0];
  };
  HostTensor first(DType::f64, {3, 2}), last(DType::f64, {1, 2}), gathered(DType::f64, {3, 6});
  for (std::int64_t i = 0; i < 6; ++i) first.set_double(i, x.as_double(i));
  for (std::int64_t i = 0; i < 2; ++i) last.set_double(i, x.as_double(6 + i));
  const HostTensor parts[] = {stats(first), stats(HostTensor(DType::f64, {0, 2})), stats(last)};
  for (std::int64_t i = 0; i < 18; ++i) gathered.set_double(i, parts[i / 6].as_double(i % 6));
  const Sample merge = parse_sample("MergeStats(f32[3,6])", DType::f64);
  EXPECT_LE(difference(run_node(merge.graph, merge.graph.order[0], {gathered})[0], stats(x)), 1e-15);
}

TEST(BatchNorm, RunningVarianceIsUnbiased) {
  const auto next = run_text("RunningStats(f32[1], f32[1], f32[4]) {momentum=0.9}",
                             {f32({1}, {1}), f32({1}, {1}), f32({4}, {2, 8, 0, 5})});
  EXPECT_FLOAT_EQ(next[0].data<float>()[0], 1.1f);
  EXPECT_FLOAT_EQ(next[1].data<float>()[0], 0.9f + 0.1f * 2.0f);
}

// ---- indexing

TEST(Gather, NegativeIndicesAndErrors) {
  const auto x = f32({3, 2}, {1, 2, 3, 4, 5, 6});
  EXPECT_THAT(values<float>(run_text("Gather(f32[3,2], i64[2])", {x, i64({2}, {-1, 0})})[0]),
              ElementsAre(5, 6, 1, 2));
  EXPECT_EQ(error_of([&] {
              run_text("Gather(f32[3,2], i64[2])", {x, i64({2}, {0, 3})});
            }),
            "Gather: index 3 at position 1 is outside of -3..2");
  EXPECT_THAT(values<float>(run_text("GatherGrad(f32[3,1], i64[3]) {shape=[2,1]}",
                                     {f32({3, 1}, {1, 10, 100}), i64({3}, {1, 0, -1})})[0]),
              ElementsAre(10, 101));
}

TEST(Move, TransposesOfOddSizes) {
  const HostTensor x = random_tensor(DType::f32, {37, 5, 53}, 1);
  const auto y = run_text("Transpose(f32[37,5,53]) {perm=[2,0,1]}", {x}, {.threads = 2})[0];
  for (std::int64_t a = 0; a < 37; ++a) {
    for (std::int64_t b = 0; b < 5; ++b) {
      for (std::int64_t c = 0; c < 53; ++c)
        ASSERT_EQ(y.as_double((c * 37 + a) * 5 + b), x.as_double((a * 5 + b) * 53 + c));
    }
  }
}

// ---- optimizers (formulas of torch.optim; two steps by hand)

TEST(Optimizer, SgdWithMomentumAndNesterov) {
  const auto step = [](const char* attrs, double number, float p, float v) {
    return run_text(cat("SgdUpdate(f32[1], f32[1], f64[5]=[0.1,", number, ",0.9,0.5,0.01], f32[1]) ", attrs),
                    {f32({1}, {p}), f32({1}, {2}), f32({1}, {v})});
  };
  auto next = step("", 1, 1, 123);  // the first velocity is the gradient: 2.01
  EXPECT_FLOAT_EQ(next[1].data<float>()[0], 2.01f);
  EXPECT_FLOAT_EQ(next[0].data<float>()[0], 1 - 0.201f);
  next = step("", 2, 1, 2);  // 0.9 * 2 + 0.5 * 2.01
  EXPECT_FLOAT_EQ(next[1].data<float>()[0], 2.805f);
  EXPECT_FLOAT_EQ(next[0].data<float>()[0], 1 - 0.2805f);
  next = step("{nesterov=1}", 2, 1, 2);  // 2.01 + 0.9 * 2.805
  EXPECT_FLOAT_EQ(next[0].data<float>()[0], 1 - 0.1f * (2.01f + 0.9f * 2.805f));
}

TEST(Optimizer, AdamCorrectsItsBias) {
  const auto step = [](const char* attrs, const char* decay) {
    return run_text(
        cat("AdamUpdate(f32[1], f32[1], f64[6]=[0.1,1,0.9,0.999,1e-8,", decay, "], f32[1], f32[1]) ", attrs),
        {f32({1}, {1}), f32({1}, {2}), f32({1}, {0}), f32({1}, {0})});
  };
  const auto plain = step("", "0");  // m/(1-0.9) = 2, sqrt(v/(1-0.999)) = 2: one whole lr
  EXPECT_FLOAT_EQ(plain[0].data<float>()[0], 0.9f);
  EXPECT_FLOAT_EQ(plain[1].data<float>()[0], 0.2f);
  EXPECT_FLOAT_EQ(plain[2].data<float>()[0], 0.004f);
  EXPECT_FLOAT_EQ(step("{decoupled=1}", "0.5")[0].data<float>()[0], 0.95f - 0.1f);
}

// ---- collectives

class CountingCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce(void* data, std::size_t count, DType) override { calls.emplace_back(data, count); }
  void all_gather(const void*, std::size_t, void*) override {}
  void reduce_scatter(const void*, std::size_t, DType, void*) override {}
  void broadcast(void*, std::size_t, int) override {}
  void barrier() override {}
  std::vector<std::pair<void*, std::size_t>> calls;
};

TEST(AllReduce, OperandsSideBySideAreOneCall) {
  const Sample sample = parse_sample("AllReduce(f32[3], f32[20], f32[2])");
  const Node& node = sample.graph.node(sample.graph.order[0]);
  const std::vector<SlotType> types = {
      {DType::f32, {3}, Layout::dense}, {DType::f32, {20}, Layout::dense}, {DType::f32, {2}, Layout::dense}};
  PlanContext context(sample.graph, node, types, types, 1);
  const onnxddp::Run run = cpu_kernels().find("AllReduce", DType::f32)->prepare(context);
  HostTensor bucket(DType::f32, {16 + 32 + 16});
  char* base = reinterpret_cast<char*>(bucket.mutable_raw());
  CountingCommunicator communicator;
  void* side_by_side[] = {base, base + 64, base + 64 + 128};
  run({side_by_side, side_by_side, nullptr, &communicator});
  ASSERT_EQ(communicator.calls.size(), 1u);
  EXPECT_EQ(communicator.calls[0], std::pair(static_cast<void*>(base), std::size_t{16 + 32 + 2}));
  communicator.calls.clear();
  void* apart[] = {base + 128, base, base + 192};
  run({apart, apart, nullptr, &communicator});
  ASSERT_EQ(communicator.calls.size(), 3u);
  EXPECT_EQ(communicator.calls[1], std::pair(static_cast<void*>(base), std::size_t{20}));
}

// ---- faces

TEST(Kernel, StridesOfLayouts) {
  EXPECT_EQ((SlotType{DType::f32, {2, 3, 4, 5}, Layout::dense}.strides()), (Ints{60, 20, 5, 1}));
  EXPECT_EQ((SlotType{DType::f32, {2, 3, 4, 5}, Layout::nhwc}.strides()), (Ints{60, 1, 15, 3}));
  EXPECT_EQ((SlotType{DType::f32, {}, Layout::dense}.strides()), Ints{});
}

TEST(Kernel, TheTableIsSearchedByElementType) {
  EXPECT_TRUE(cpu_kernels().find("Conv", DType::f64));
  EXPECT_FALSE(cpu_kernels().find("Conv", DType::i64));
  EXPECT_FALSE(cpu_kernels().find("NoSuchOp", DType::f32));
  EXPECT_TRUE(cpu_kernels().find("Reshape", DType::bf16)) << "moves elements of any type";
}

TEST(Kernel, ConstantsAreEvaluated) {
  const Graph g =
      parse("graph g v1\nconst a: f32[2] = [1, 2]\nconst b: f32[] = [3]\ny: f32[2] = Mul(a, b)\noutput y\n");
  EXPECT_THAT(values<float>(evaluate_constant(g, g.order[0])[0]), ElementsAre(3, 6));
}

TEST(CpuDevice, MemoryIsAlignedAndZero) {
  const auto device = make_cpu_device(2);
  EXPECT_EQ(device->kind(), "cpu");
  EXPECT_EQ(device->name(), "cpu, 2 threads");
  void* memory = device->allocate(100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
  const std::int64_t seven = 7;
  std::int64_t back[2] = {1, 1};
  device->upload(memory, &seven, 8);
  device->download(back, memory, 16);
  EXPECT_THAT(back, ElementsAre(7, 0));
  device->free(memory);
  EXPECT_THAT(error_of([] { make_cpu_device(0); }), HasSubstr("at least one thread"));
}

}  // namespace
}  // namespace onnxddp

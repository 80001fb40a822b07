#include "graph/types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "graph/tensor.h"

namespace onnxddp {
namespace {

const Dim N = Dim::symbol("N");
const Dim S = Dim::symbol("S");

TEST(Dim, IsACanonicalPolynomial) {
  EXPECT_EQ((N + 1) * (N - 1), N * N - 1);
  EXPECT_EQ((N + S) * 2, 2 * S + N * 2);
  EXPECT_EQ(N - N, Dim(0));
  EXPECT_EQ((N * 128).str(), "128*N");
  EXPECT_EQ((N * S * -1 + 3).str(), "-N*S+3");
  EXPECT_EQ(Dim(0).str(), "0");
}

TEST(Dim, DividesExactlyWhereItComesOutEven) {
  EXPECT_EQ(floor_div(N * 64, 64), N);
  EXPECT_EQ(floor_div(N * 64, N), Dim(64));
  EXPECT_EQ(floor_div(N * 4 + 8, 4), N + 2);
  EXPECT_EQ(exact_div(N * S * 6, S * 2), N * 3);
  EXPECT_EQ(exact_div((N + 1) * 6, N + 1), Dim(6));
  EXPECT_EQ(exact_div(N * 3, 2), std::nullopt);
  EXPECT_EQ(floor_div(Dim(-7), 2), Dim(-4));
}

TEST(Dim, KeepsAnUnevenDivisionAsAnAtom) {
  const Dim half = floor_div(N + 1, 2);
  EXPECT_EQ(half.str(), "floor(N+1,2)");
  EXPECT_EQ(half * 2 + half, half * 3);
  EXPECT_EQ(half.bind({{"N", 6}}), Dim(3));
  EXPECT_EQ(half.symbols(), std::set<std::string>{"N"});
  EXPECT_EQ(Dim::parse(half.str()), half);
  const Dim nested = floor_div(half + S, 3);
  EXPECT_EQ(Dim::parse(nested.str()), nested);
  EXPECT_EQ(nested.bind({{"N", 9}, {"S", 8}}), Dim(4));
}

TEST(Dim, RefusesOverflowAndDivisionByZero) {
  EXPECT_THROW(Dim(INT64_MAX) + 1, Error);
  EXPECT_THROW(Dim(INT64_MAX) * 2, Error);
  EXPECT_THROW(floor_div(N, 0), Error);
  EXPECT_THROW(Dim::parse("N+"), Error);
  EXPECT_THROW(Dim::parse("99999999999999999999"), Error);
}

TEST(Shape, BroadcastsLikeNumpy) {
  EXPECT_EQ(broadcast({N, 3}, {3}), (Shape{N, 3}));
  EXPECT_EQ(broadcast({N, 1, 4}, {5, 1}), (Shape{N, 5, 4}));
  EXPECT_EQ(broadcast({}, {2}), (Shape{2}));
  EXPECT_EQ(broadcast({1, N}, {N, 1}), (Shape{N, N}));
  EXPECT_THROW(broadcast({N}, {3}), Error);
}

TEST(TensorType, RoundTripsAsText) {
  for (const char* text : {"f32[]", "i64[3]", "f32[N,3,floor(N+1,2)]", "bool[128*N]"})
    EXPECT_EQ(TensorType::parse(text).str(), text);
  EXPECT_THROW(TensorType::parse("f31[2]"), Error);
}

TEST(Number, IsShortestRoundTrip) {
  EXPECT_EQ(number_str(decimal_of(1e-5F)), "1e-05");
  EXPECT_EQ(number_str(decimal_of(0.1F)), "0.1");
  EXPECT_EQ(number_str(-INFINITY), "-inf");
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const float value = std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 60) - 60);
    EXPECT_EQ(static_cast<float>(decimal_of(value)), value);
  }
}

TEST(HostTensor, SharesUntilWritten) {
  HostTensor a = HostTensor::of<float>({2}, {1, 2});
  const HostTensor b = a;
  a.mutable_data<float>()[0] = 9;
  EXPECT_EQ(b.data<float>()[0], 1);
  EXPECT_NE(a.digest(), b.digest());
}

TEST(HostTensor, ConvertsHalves) {
  for (double value : {0.0, 1.0, -2.5, 65504.0, 6e-8, 0.333251953125})
    EXPECT_NEAR(HostTensor::full(DType::f16, {}, value).as_double(0), value, std::fabs(value) * 1e-3 + 3e-8);
  EXPECT_TRUE(std::isinf(HostTensor::full(DType::f16, {}, 1e6).as_double(0)));
  EXPECT_EQ(HostTensor::full(DType::bf16, {}, 1.0).as_double(0), 1.0);
  EXPECT_EQ(HostTensor::full(DType::f32, {}, 3e20).cast(DType::i64).as_int(0), INT64_MAX);
}

TEST(HostTensor, RefusesImpossibleShapes) {
  EXPECT_THROW(HostTensor(DType::f32, {-1}), Error);
  EXPECT_THROW(HostTensor(DType::f64, {INT64_MAX / 2, 4}), Error);
}

}  // namespace
}  // namespace onnxddp

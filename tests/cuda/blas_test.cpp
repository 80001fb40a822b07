// Products and their epilogues against plain loops.
#include <cmath>
#include <cstring>

#include "executor/cuda/blas.h"
#include "graph/tensor.h"
#include "tests/cuda/device_case.h"

namespace onnxddp::cuda {
namespace {

/// Row-major loops, sums in double.
std::vector<float> product(const Product& p, const std::vector<float>& a, const std::vector<float>& b, std::vector<float> c) {
  const std::int64_t lda = p.lda != 0 ? p.lda : p.trans_a ? p.m : p.k, ldb = p.ldb != 0 ? p.ldb : p.trans_b ? p.k : p.n;
  const std::int64_t ldc = p.ldc != 0 ? p.ldc : p.n;
  for (std::int64_t t = 0; t < p.batch; ++t)
    for (std::int64_t i = 0; i < p.m; ++i)
      for (std::int64_t j = 0; j < p.n; ++j) {
        double sum = 0;
        for (std::int64_t l = 0; l < p.k; ++l)
          sum += double{a[static_cast<std::size_t>(t * p.stride_a + (p.trans_a ? l * lda + i : i * lda + l))]} *
                 double{b[static_cast<std::size_t>(t * p.stride_b + (p.trans_b ? j * ldb + l : l * ldb + j))]};
        float& y = c[static_cast<std::size_t>(t * p.stride_c + i * ldc + j)];
        y = static_cast<float>(p.alpha * sum + (p.beta == 0 ? 0 : p.beta * double{y}));
      }
  return c;
}

class Products : public DeviceTest {
 protected:
  void check(const Product& p, std::int64_t a_size, std::int64_t b_size, std::int64_t c_size) {
    const std::vector<float> a = random_floats(a_size, 1), b = random_floats(b_size, 2), c = random_floats(c_size, 3);
    DeviceMemory da = on_device(a), db = on_device(b), dc = on_device(c);
    device_->lane().blas->multiply(p, da.get(), db.get(), dc.get());
    expect_close(from_device<float>(dc), product(p, a, b, c), 1e-5);
  }
};
INSTANTIATE_DEVICE_TESTS(Products);

TEST_P(Products, OfAllTranspositions) {
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      Product p;
      p.m = 5, p.n = 7, p.k = 3;
      p.trans_a = trans_a, p.trans_b = trans_b;
      check(p, 15, 21, 35);
    }
  }
}

TEST_P(Products, WithFactorsAndRowsApart) {
  Product p;
  p.m = 3, p.n = 4, p.k = 5;
  p.lda = 7, p.ldb = 6, p.ldc = 9;
  p.alpha = 0.5f, p.beta = 2;
  check(p, 3 * 7, 5 * 6, 3 * 9);
}

TEST_P(Products, InBatchesWithOneOperandShared) {
  Product p;
  p.m = 2, p.n = 3, p.k = 4;
  p.batch = 3;
  p.stride_a = 8, p.stride_b = 0, p.stride_c = 6;
  check(p, 24, 12, 18);
}

TEST_P(Products, OfNothing) {
  Product p;
  p.m = 2, p.n = 3, p.k = 0;
  check(p, 1, 1, 6);  // zeros
  p.m = 0, p.k = 4;
  check(p, 1, 12, 1);
}

TEST_P(Products, OfBf16SumInFloat) {
  Product p;
  p.m = 4, p.n = 4, p.k = 64;
  p.dtype = DType::bf16;
  const std::vector<float> a = random_floats(256, 1), b = random_floats(256, 2);
  // Rounded by cutting: bf16 is the upper half of a float.
  const auto narrow = [](const std::vector<float>& from, std::vector<float>& exact) {
    std::vector<std::uint16_t> out;
    for (const float v : from) {
      std::uint32_t bits;
      std::memcpy(&bits, &v, 4);
      out.push_back(static_cast<std::uint16_t>(bits >> 16));
      bits &= 0xffff0000u;
      std::memcpy(&exact.emplace_back(), &bits, 4);
    }
    return out;
  };
  std::vector<float> exact_a, exact_b;
  DeviceMemory da = on_device(narrow(a, exact_a)), db = on_device(narrow(b, exact_b)), dc(64);
  device_->lane().blas->multiply(p, da.get(), db.get(), dc.get());
  expect_close(from_device<float>(dc), product(p, exact_a, exact_b, std::vector<float>(16)), 1e-5);
}

class Epilogues : public DeviceTest {
 protected:
  static constexpr std::int64_t kM = 16, kN = 32, kK = 8;
  Product shape() const {
    Product p;
    p.m = kM, p.n = kN, p.k = kK;
    return p;
  }
  std::vector<float> a_ = random_floats(kM * kK, 1), b_ = random_floats(kK * kN, 2), bias_ = random_floats(kN, 3);
  std::vector<float> plain_ = product(shape(), a_, b_, std::vector<float>(kM * kN));
};
INSTANTIATE_DEVICE_TESTS(Epilogues);

TEST_P(Epilogues, BiasAndRelu) {
  const auto fused = FusedProduct::make(*device_->lane().blas, shape(), Epilogue::relu_bias);
  if (fused == nullptr) GTEST_SKIP() << "no such epilogue here";
  EXPECT_EQ(fused->aux_bytes(), 0u);
  DeviceMemory a = on_device(a_), b = on_device(b_), bias = on_device(bias_), y(kM * kN * 4);
  fused->run(a.get(), b.get(), y.get(), bias.get(), nullptr);
  std::vector<float> expected = plain_;
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = std::max(0.0f, expected[i] + bias_[i % kN]);
  expect_close(from_device<float>(y), expected, 1e-5);
}

TEST_P(Epilogues, GeluIsTheTanhForm) {
  const auto fused = FusedProduct::make(*device_->lane().blas, shape(), Epilogue::gelu_bias);
  if (fused == nullptr) GTEST_SKIP() << "no such epilogue here";
  DeviceMemory a = on_device(a_), b = on_device(b_), bias = on_device(bias_), y(kM * kN * 4);
  fused->run(a.get(), b.get(), y.get(), bias.get(), nullptr);
  std::vector<float> expected = plain_;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double x = double{expected[i]} + double{bias_[i % kN]};
    expected[i] = static_cast<float>(0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))));
  }
  expect_close(from_device<float>(y), expected, 1e-5);
}

TEST_P(Epilogues, TheReluMaskLeadsBack) {
  Blas& blas = *device_->lane().blas;
  const auto forward = FusedProduct::make(blas, shape(), Epilogue::relu_aux_bias);
  const auto backward = FusedProduct::make(blas, shape(), Epilogue::relu_grad_bias);
  if (forward == nullptr || backward == nullptr) GTEST_SKIP() << "no such epilogue here";
  EXPECT_EQ(forward->aux_row(), 128);
  EXPECT_EQ(forward->aux_bytes(), 16u * kM);
  DeviceMemory a = on_device(a_), b = on_device(b_), bias = on_device(bias_), y(kM * kN * 4), dbias(kN * 4);
  DeviceMemory mask = on_device(std::vector<unsigned char>(forward->aux_bytes()));
  forward->run(a.get(), b.get(), y.get(), bias.get(), mask.get());
  const std::vector<float> activated = from_device<float>(y);
  backward->run(a.get(), b.get(), y.get(), dbias.get(), mask.get());
  std::vector<float> expected = plain_, sums(kN);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] = activated[i] > 0 ? expected[i] : 0;
    sums[i % kN] += expected[i];
  }
  expect_close(from_device<float>(y), expected, 1e-5);
  expect_close(from_device<float>(dbias), sums, 1e-4);
}

}  // namespace
}  // namespace onnxddp::cuda

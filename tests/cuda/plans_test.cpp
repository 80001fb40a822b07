// The real cuDNN builds the plans of every convolution of the models from the description of an H200: no GPU
// is needed.
#include <cudnn_graph.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "executor/cuda/conv.h"

namespace onnxddp::cuda {
namespace {

// The version that the description was written for.
constexpr std::size_t kVersion = 91900;

/// c x size x size image, k channels out, square kernel.
struct Shape {
  std::int64_t c, size, k, kernel, stride, pad;
};
constexpr Shape kResNet20[] = {{3, 32, 16, 3, 1, 1},  {16, 32, 16, 3, 1, 1}, {16, 32, 32, 3, 2, 1},
                               {16, 32, 32, 1, 2, 0}, {32, 16, 32, 3, 1, 1}, {32, 16, 64, 3, 2, 1},
                               {32, 16, 64, 1, 2, 0}, {64, 8, 64, 3, 1, 1}};
constexpr Shape kDigits[] = {{1, 8, 16, 3, 1, 1}, {16, 4, 32, 3, 1, 1}};
constexpr Shape kResNet50[] = {
    {3, 224, 64, 7, 2, 3},     {64, 56, 64, 1, 1, 0},    {64, 56, 64, 3, 1, 1},    {64, 56, 256, 1, 1, 0},
    {256, 56, 64, 1, 1, 0},    {256, 56, 128, 1, 1, 0},  {128, 56, 128, 3, 2, 1},  {128, 28, 512, 1, 1, 0},
    {256, 56, 512, 1, 2, 0},   {512, 28, 128, 1, 1, 0},  {128, 28, 128, 3, 1, 1},  {512, 28, 256, 1, 1, 0},
    {256, 28, 256, 3, 2, 1},   {256, 14, 1024, 1, 1, 0}, {512, 28, 1024, 1, 2, 0}, {1024, 14, 256, 1, 1, 0},
    {256, 14, 256, 3, 1, 1},   {1024, 14, 512, 1, 1, 0}, {512, 14, 512, 3, 2, 1},  {512, 7, 2048, 1, 1, 0},
    {1024, 14, 2048, 1, 2, 0}, {2048, 7, 512, 1, 1, 0},  {512, 7, 512, 3, 1, 1}};
constexpr std::int64_t kBatch = 32;

ConvProblem problem(ConvKind kind, DType dtype, const Shape& s) {
  ConvProblem p;
  p.kind = kind;
  p.dtype = dtype;
  p.n = kBatch;
  p.c = s.c;
  p.h = p.w = s.size;
  p.k = s.k;
  p.r = p.s = s.kernel;
  p.top = p.left = p.bottom = p.right = s.pad;
  p.stride_h = p.stride_w = s.stride;
  return p;
}

std::string h200() {
  std::ifstream file(ONNXDDP_SOURCE_DIR "/tests/golden/cudnn/h200.json");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class Plans : public testing::Test {
 protected:
  void SetUp() override {
    if (Cudnn::version() != kVersion)
      GTEST_SKIP() << "the device description is for cuDNN " << kVersion << ", this is " << Cudnn::version();
    cudnn_ = std::make_unique<Cudnn>(h200());
  }

  /// All three directions of all shapes; the largest workspace.
  template <std::size_t N>
  std::size_t build_all(const Shape (&shapes)[N], DType dtype, const ConvOptions& options) {
    std::size_t largest = 0;
    for (const Shape& shape : shapes) {
      for (const ConvKind kind : {ConvKind::forward, ConvKind::data_grad, ConvKind::weight_grad}) {
        const ConvProblem p = problem(kind, dtype, shape);
        SCOPED_TRACE(describe(p, options));
        try {
          const ConvPlan plan = ConvPlan::build(*cudnn_, p, options);
          EXPECT_LE(plan.workspace_bytes(), options.workspace_limit);
          check_notes(plan, dtype, options);
          largest = std::max(largest, plan.workspace_bytes());
          if (std::getenv("ONNXDDP_SHOW_PLANS") != nullptr)
            std::printf("%10zu %s\n", plan.workspace_bytes(), describe(p, options).c_str());
        } catch (const Error& e) {
          ADD_FAILURE() << e.report();
        }
      }
    }
    return largest;
  }

  static void check_notes(const ConvPlan& plan, DType dtype, const ConvOptions& options) {
    for (const cudnnBackendNumericalNote_t note : plan.notes()) {
      EXPECT_NE(note, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
      if (dtype == DType::f32 && options.math == FloatMath::strict) {
        EXPECT_NE(note, CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
        EXPECT_NE(note, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS);
      }
    }
  }

  std::unique_ptr<Cudnn> cudnn_;
};

// The bounds: measured at 32 images, the first convolution of ResNet-50 and its 56 x 56 images in strict
// float need the most.
constexpr std::size_t kSmall = std::size_t{32} << 20, kStrict = std::size_t{192} << 20;

TEST_F(Plans, OfTheSmallModels) {
  build_all(kDigits, DType::f32, {FloatMath::strict, true, kSmall});
  build_all(kDigits, DType::f32, {FloatMath::tf32, true, kSmall});
  build_all(kDigits, DType::bf16, {FloatMath::strict, true, kSmall});
  build_all(kResNet20, DType::f32, {FloatMath::strict, true, kSmall});
  build_all(kResNet20, DType::f32, {FloatMath::tf32, true, kSmall});
  build_all(kResNet20, DType::bf16, {FloatMath::strict, true, kSmall});
}

TEST_F(Plans, OfResNet50InStrictFloat) {
  build_all(kResNet50, DType::f32, {FloatMath::strict, true, kStrict});
}
TEST_F(Plans, OfResNet50InTf32) { build_all(kResNet50, DType::f32, {FloatMath::tf32, true, kSmall}); }
TEST_F(Plans, OfResNet50InBf16) { build_all(kResNet50, DType::bf16, {FloatMath::strict, true, kSmall}); }

/// What ONNX allows and the models do not have: pads that differ by side, dilation, groups down to one
/// channel, odd numbers of channels.
std::vector<ConvProblem> unusual() {
  ConvProblem uneven;
  uneven.n = 2, uneven.c = 3, uneven.h = 6, uneven.w = 5, uneven.k = 4, uneven.r = 3, uneven.s = 2;
  uneven.left = uneven.bottom = 1, uneven.stride_h = 2;
  ConvProblem dilated;
  dilated.n = 1, dilated.c = 2, dilated.h = dilated.w = 7, dilated.k = 3, dilated.r = dilated.s = 3;
  dilated.top = 2, dilated.left = 1, dilated.right = 2, dilated.dilation_h = dilated.dilation_w = 2;
  ConvProblem groups;
  groups.n = 2, groups.c = 4, groups.h = groups.w = 5, groups.k = 6, groups.r = groups.s = 3;
  groups.top = groups.left = groups.bottom = groups.right = 1, groups.group = 2;
  groups.stride_h = groups.stride_w = 2;
  ConvProblem channels = groups;
  channels.k = channels.group = 4;
  return {uneven, dilated, groups, channels};
}

TEST_F(Plans, OfUnusualConvolutions) {
  for (ConvProblem p : unusual()) {
    for (const ConvKind kind : {ConvKind::forward, ConvKind::data_grad, ConvKind::weight_grad}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        p.kind = kind;
        p.dtype = dtype;
        SCOPED_TRACE(describe(p, {}));
        try {
          ConvPlan::build(*cudnn_, p, {});
        } catch (const Error& e) {
          ADD_FAILURE() << e.report();
        }
      }
    }
  }
}

TEST_F(Plans, ASerialisedPlanLoadsAgain) {
  for (const ConvKind kind : {ConvKind::forward, ConvKind::data_grad, ConvKind::weight_grad}) {
    const ConvPlan plan = ConvPlan::build(*cudnn_, problem(kind, DType::bf16, kResNet20[1]), {});
    const std::string text = plan.serialise();
    EXPECT_GT(text.size(), 100u);
    EXPECT_LT(text.size(), 100000u);
    const std::optional<ConvPlan> again = ConvPlan::load(*cudnn_, text, ConvOptions().workspace_limit);
    ASSERT_TRUE(again.has_value());
    EXPECT_EQ(again->workspace_bytes(), plan.workspace_bytes());
    EXPECT_EQ(again->serialise(), text);
    EXPECT_EQ(ConvPlan::load(*cudnn_, text, 0).has_value(), plan.workspace_bytes() == 0);
  }
  EXPECT_FALSE(ConvPlan::load(*cudnn_, "{}", 1 << 20).has_value());
}

TEST_F(Plans, TheCacheKnowsDeviceAndVersion) {
  const ConvProblem p = problem(ConvKind::forward, DType::f32, kDigits[1]);
  ConvPlanCache cache;
  cache.get(*cudnn_, p, {});
  cache.get(*cudnn_, p, {});
  EXPECT_EQ(cache.hits(), 1);
  std::string half = h200();
  half.replace(half.find("132,"), 4, "66, ");
  Cudnn smaller(half);
  EXPECT_NE(smaller.identity(), cudnn_->identity());
  EXPECT_NE(cudnn_->identity().find("cudnn 91900 device "), std::string::npos);
  cache.get(smaller, p, {});
  EXPECT_EQ(cache.hits(), 1);
  EXPECT_EQ(cache.size(), 2u);
}

TEST(Description, NonsenseIsRefused) { EXPECT_THROW(Cudnn(std::string("{}")), Error); }

}  // namespace
}  // namespace onnxddp::cuda

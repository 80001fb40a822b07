// Which tensors train (design A2).
#include "tests/importer/onnx_testing.h"

namespace onnxddp::testing {
namespace {

std::string role_text(const ImportedModel& model, const std::string& name) {
  const TensorRole& role = role_of(model, name);
  return cat(role_name(role.role), ": ", role.reason);
}

std::string kind_text(const ImportedModel& model, const std::string& name) {
  return std::string(kind_name(model.graph.value(model.graph.find(name)).kind));
}

TEST(Roles, SlotsTrainAtAnySizeAndStatisticsAreBuffers) {
  const ImportedModel model = import_text(
      model_text(15, R"(g (float[N,1,4,4] x) => (float[N,1,4,4] y) <float[1,1,1,1] w = {2}, float[1] b = {0},
      float[1] s = {1}, float[1] o = {0}, float[1] m = {0}, float[1] v = {1}> {
    [c1] h = Conv(x, w, b)
    [bn1] y = BatchNormalization(h, s, o, m, v)
  })"));
  EXPECT_EQ(role_text(model, "w"), "parameter: W of Conv 'c1'");
  EXPECT_EQ(role_text(model, "b"), "parameter: B of Conv 'c1'");
  EXPECT_EQ(role_text(model, "s"), "parameter: scale of BatchNormalization 'bn1'");
  EXPECT_EQ(role_text(model, "o"), "parameter: bias of BatchNormalization 'bn1'");
  EXPECT_EQ(role_text(model, "m"), "buffer: running mean of BatchNormalization 'bn1'");
  EXPECT_EQ(role_text(model, "v"), "buffer: running variance of BatchNormalization 'bn1'");
  EXPECT_EQ(kind_text(model, "w"), "param");
  EXPECT_EQ(kind_text(model, "m"), "state");
}

TEST(Roles, ConstantNodesTrainLikeInitializers) {
  const ImportedModel model = import_text(model_text(13, R"(g (float[N,2] x) => (float[N,2] y) {
    w = Constant<value = float[2,2] {1.0, 2.0, 3.0, 4.0}>()
    b = Constant<value_floats = [1.0, 2.0]>()
    h = MatMul(x, w)
    y = Add(b, h)
  })"));
  EXPECT_EQ(role_text(model, "w"), "parameter: W of MatMul");
  EXPECT_EQ(role_text(model, "b"), "parameter: bias of MatMul");
  EXPECT_EQ(model.values.at("b"), HostTensor::of<float>({2}, {1, 2}));
}

TEST(Roles, ViewsLeadToTheirRoots) {
  const ImportedModel model = import_text(model_text(
      13,
      R"(g (float[N,4] x) => (float[N,2] y) <float[2,2] a = {1,2,3,4}, float[1,4] b = {1,2,3,4}, double[3,3] c = {1,2,3,4,5,6,7,8,9},
      int64[2] s = {2, 2}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] ax = {0}, int64[1] ax1 = {1}> {
    a1 = Transpose(a)
    a2 = Identity(a1)
    b1 = Reshape(b, s)
    c1 = Cast<to = 1>(c)
    c2 = Slice(c1, zero, two, ax)
    c3 = Slice(c2, zero, two, ax1)
    ab = Concat<axis = 0>(a2, b1)
    [fc] h = MatMul(x, ab)
    y = MatMul(h, c3)
  })"));
  EXPECT_EQ(role_text(model, "a"), "parameter: W of MatMul 'fc'");
  EXPECT_EQ(role_text(model, "b"), "parameter: W of MatMul 'fc'");
  EXPECT_EQ(role_text(model, "c"), "parameter: W of MatMul");
  EXPECT_EQ(role_of(model, "s").role, Role::constant);
  EXPECT_EQ(kind_text(model, "c"), "param");
}

TEST(Roles, SplitSqueezeAndUnsqueezeAreViewsButExpandIsNot) {
  const ImportedModel model = import_text(model_text(
      13,
      R"(g (float[N,2] x) => (float[N,2] y, float[N,2] z) <float[2,4] a = {1,2,3,4,5,6,7,8}, float[1,2] b = {1,2}, float[1] e = {1}, int64[1] zero = {0}, int64[1] two = {2}> {
    p, q = Split<axis = 1>(a)
    h = MatMul(x, q)
    b0 = Squeeze(b, zero)
    b1 = Unsqueeze(b0, zero)
    y = Sub(h, b1)
    e1 = Expand(e, two)
    z = Sub(x, e1)
  })"));
  EXPECT_EQ(role_text(model, "a"), "parameter: W of MatMul");
  EXPECT_EQ(role_text(model, "b"), "parameter: operand of Sub");
  EXPECT_EQ(role_of(model, "e").role, Role::constant);
}

TEST(Roles, OneElementOperandsMasksAndOtherOperandsDoNotTrain) {
  const std::string text = model_text(
      13,
      R"(g (float[N,2] x) => (float[N,2] y) <float[1] k = {0.7}, float[2] p = {1, 2}, float[2] m = {0, -10000}, float[2] zeros = {0, 0}, float e = {2}, float lo = {-1}> {
    [scale] a = Mul(x, k)
    [shift] b = Add(a, p)
    c = Add(b, m)
    d = Add(c, zeros)
    f = Pow(d, e)
    y = Clip(f, lo)
  })");
  const ImportedModel model = import_text(text);
  EXPECT_EQ(role_text(model, "k"), "constant: operand of Mul 'scale', one element: trains only by --train");
  EXPECT_EQ(role_text(model, "p"), "parameter: operand of Add 'shift'");
  EXPECT_EQ(role_text(model, "m"), "constant: operand of Add, a mask");
  EXPECT_EQ(role_text(model, "zeros"), "parameter: operand of Add");
  EXPECT_EQ(role_of(model, "e").role, Role::constant);
  EXPECT_EQ(role_of(model, "lo").role, Role::constant);
  ImportOptions options;
  options.train = "k";
  EXPECT_EQ(role_text(import_text(text, options), "k"), "parameter: --train");
  options.train = "K";
  EXPECT_HAS(report_of([&] { import_text(text, options); }), "--train 'K' matches no tensor that can train");
  options.train = "(";
  EXPECT_HAS(report_of([&] { import_text(text, options); }), "is not a regular expression");
}

TEST(Roles, AOneElementBiasRightBehindAProductTrains) {
  const ImportedModel model = import_text(model_text(
      13,
      R"(g (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1,2}, float[1] b = {3}> { h = MatMul(x, w) y = Add(h, b) })"));
  EXPECT_EQ(role_text(model, "b"), "parameter: bias of MatMul");
}

TEST(Roles, FrozenOnesAreStateAndSharedOnesAreOne) {
  ImportOptions options;
  options.freeze = "w.*";
  const ImportedModel model = import_text(
      model_text(13,
                 R"(g (int64[N] t) => (float[N,3] y) <float[3,2] w = {1,2,3,4,5,6}, float[3] b = {1,2,3}> {
    e = Gather(w, t)
    wt = Transpose(w)
    h = MatMul(e, wt)
    y = Add(h, b)
  })"),
      options);
  EXPECT_EQ(role_text(model, "w"), "frozen: table of Gather, --freeze");
  EXPECT_EQ(kind_text(model, "w"), "state");
  EXPECT_TRUE(model.values.count("w"));
  EXPECT_EQ(model.graph.params.size(), 2U);
}

TEST(Roles, IntegersNeverTrain) {
  const ImportedModel model = import_text(
      model_text(13, "g (int64[N] t) => (int64[N] y) <int64[3] w = {1,2,3}> { y = Gather(w, t) }"));
  EXPECT_EQ(role_of(model, "w").role, Role::constant);
  EXPECT_EQ(kind_text(model, "w"), "const");
  EXPECT_EQ(model.warnings.at(0), "no tensor of the model trains; `--train REGEX` names some");
}

TEST(Roles, WeightsOfOperatorsThatAreInlinedAreSlotsToo) {
  const ImportedModel model = import_text(model_text(
      17,
      R"(g (float[N,1] x) => (float[N,1] y) <float[1] s = {1}, float[1] b = {0}> { [ln] y = LayerNormalization(x, s, b) })"));
  EXPECT_EQ(role_text(model, "s"), "parameter: scale of LayerNormalization 'ln'");
}

TEST(Roles, InputsAndOutputsAreListed) {
  const ImportedModel model =
      import_text(model_text(13, "g (float[N,2] x) => (float[N,2] y) { y = Relu(x) }"));
  EXPECT_EQ(role_of(model, "x").role, Role::input);
  EXPECT_EQ(role_of(model, "y").role, Role::output);
  EXPECT_EQ(role_of(model, "y").type.str(), "f32[N,2]");
}

}  // namespace
}  // namespace onnxddp::testing

// Every opset's form of an operator becomes one canonical form; functions are inlined; the batch is symbolic.
#include "tests/importer/onnx_testing.h"

namespace onnxddp::testing {
namespace {

/// The canonical nodes of one operator call on x of the given type.
struct Case {
  const char* what;
  int opset;
  const char* body;
  const char* nodes;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.what; }

class Normalises : public ::testing::TestWithParam<Case> {};

TEST_P(Normalises, ToTheCanonicalForm) {
  const Case& c = GetParam();
  std::string got;
  EXPECT_EQ(report_of([&] { got = import_nodes(c.opset, c.body); }), "no error");
  EXPECT_EQ(got, c.nodes);
}

const Case kCases[] = {
    // axes from attribute to input
    {"Squeeze11", 11, "g (float[1,3,1] x) => (float[3] y) { y = Squeeze<axes = [0, -1]>(x) }",
     "y: f32[3] = Squeeze(x) {axes=[0,2]}"},
    {"Squeeze13", 13, "g (float[1,3,1] x) => (float[3] y) <int64[2] a = {0, -1}> { y = Squeeze(x, a) }",
     "y: f32[3] = Squeeze(x) {axes=[0,2]}"},
    {"SqueezeAll", 13, "g (float[1,3,1] x) => (float[3] y) { y = Squeeze(x) }",
     "y: f32[3] = Squeeze(x) {axes=[0,2]}"},
    {"Unsqueeze11", 11, "g (float[3] x) => (float[1,3,1] y) { y = Unsqueeze<axes = [0, 2]>(x) }",
     "y: f32[1,3,1] = Unsqueeze(x) {axes=[0,2]}"},
    {"Unsqueeze13", 13, "g (float[3] x) => (float[1,3,1] y) <int64[2] a = {0, -1}> { y = Unsqueeze(x, a) }",
     "y: f32[1,3,1] = Unsqueeze(x) {axes=[0,2]}"},
    {"ReduceSum11", 11, "g (float[2,3] x) => (float[2,1] y) { y = ReduceSum<axes = [-1]>(x) }",
     "y: f32[N,1] = ReduceSum(x) {axes=[1]}"},
    {"ReduceSum13", 13,
     "g (float[2,3] x) => (float[2] y) <int64[1] a = {1}> { y = ReduceSum<keepdims = 0>(x, a) }",
     "y: f32[N] = ReduceSum(x) {axes=[1], keepdims=0}"},
    {"ReduceSumNone", 13, "g (float[2,3] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }",
     "y: f32[] = ReduceSum(x) {axes=[0,1], keepdims=0}"},
    {"ReduceMean13", 13, "g (float[2,3] x) => (float[1,1] y) { y = ReduceMean<axes = [0, 1]>(x) }",
     "y: f32[1,1] = ReduceMean(x) {axes=[0,1]}"},
    {"ReduceMean18", 18, "g (float[2,3] x) => (float[1,1] y) <int64[2] a = {1, 0}> { y = ReduceMean(x, a) }",
     "y: f32[1,1] = ReduceMean(x) {axes=[0,1]}"},
    {"ReduceMax17", 17, "g (float[2,3] x) => (float[2,1] y) { y = ReduceMax<axes = [1]>(x) }",
     "y: f32[N,1] = ReduceMax(x) {axes=[1]}"},
    {"ReduceMax20", 20, "g (float[2,3] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceMax(x, a) }",
     "y: f32[N,1] = ReduceMax(x) {axes=[1]}"},
    {"ReduceNoop", 18, "g (float[2,3] x) => (float[2,3] y) { y = ReduceMean<noop_with_empty_axes = 1>(x) }",
     "y: f32[N,3] = Identity(x)"},
    // Softmax flattens before 13
    {"Softmax11", 11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }",
     "y.t: f32[N,12] = Reshape(x) {shape=[N,12]}\ny.2: f32[N,12] = Softmax(y.t) {axis=1}\ny: f32[N,3,4] = "
     "Reshape(y.2) {shape=[N,3,4]}"},
    {"Softmax11Last", 11, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis = -1>(x) }",
     "y: f32[N,3,4] = Softmax(x) {axis=2}"},
    {"Softmax13", 13, "g (float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }",
     "y: f32[N,3,4] = Softmax(x) {axis=2}"},
    {"LogSoftmax8", 8, "g (float[N,4] x) => (float[N,4] y) { y = LogSoftmax(x) }",
     "y: f32[N,4] = LogSoftmax(x) {axis=1}"},
    {"LogSoftmax13", 13, "g (float[2,3,4] x) => (float[2,3,4] y) { y = LogSoftmax<axis = 1>(x) }",
     "y: f32[N,3,4] = LogSoftmax(x) {axis=1}"},
    // Clip
    {"Clip6", 7, "g (float[2] x) => (float[2] y) { y = Clip<min = 0.0, max = 6.0>(x) }",
     "y: f32[N] = Clip(x) {max=6, min=0}"},
    {"Clip11", 11, "g (float[2] x) => (float[2] y) <float lo = {0}, float hi = {6}> { y = Clip(x, lo, hi) }",
     "y: f32[N] = Clip(x) {max=6, min=0}"},
    {"Clip13OneSide", 13, "g (float[2] x) => (float[2] y) <float hi = {6}> { y = Clip(x, , hi) }",
     "y: f32[N] = Clip(x) {max=6}"},
    {"ClipOfCasts", 15,
     "g (float[2] x) => (float[2] y) { a = Constant<value_int = 1>() b = CastLike(a, x) y = Clip(x, b) }",
     "y: f32[N] = Clip(x) {min=1}"},
    // Slice, Split, Pad-free
    {"Slice9", 9, "g (float[4,5] x) => (float[2,5] y) { y = Slice<starts = [1], ends = [3], axes = [0]>(x) }",
     "y: f32[2,5] = Slice(x) {axes=[0], ends=[3], starts=[1], steps=[1]}"},
    {"Slice10", 10,
     "g (float[4,5] x) => (float[4,2] y) <int64[1] s = {-2}, int64[1] e = {9223372036854775807}, int64[1] a "
     "= {1}> { y = Slice(x, s, e, a) }",
     "y: f32[N,2] = Slice(x) {axes=[1], ends=[5], starts=[3], steps=[1]}"},
    {"Slice13Back", 13,
     "g (float[4] x) => (float[4] y) <int64[1] s = {-1}, int64[1] e = {-9223372036854775807}, int64[1] a = "
     "{0}, int64[1] t = {-1}> { y = Slice(x, s, e, a, t) }",
     "y: f32[N] = Slice(x) {axes=[0], ends=[-1], starts=[N-1], steps=[-1]}"},
    {"Split11", 11,
     "g (float[5] x) => (float[2] y, float[3] z) { y, z = Split<axis = 0, split = [2, 3]>(x) }",
     "y: f32[2] = Slice(x) {axes=[0], ends=[2], starts=[0], steps=[1]}\nz: f32[3] = Slice(x) {axes=[0], "
     "ends=[5], starts=[2], steps=[1]}"},
    {"Split13", 13, "g (float[5] x) => (float[2] y, float[3] z) <int64[2] s = {2, 3}> { y, z = Split(x, s) }",
     "y: f32[2] = Slice(x) {axes=[0], ends=[2], starts=[0], steps=[1]}\nz: f32[3] = Slice(x) {axes=[0], "
     "ends=[5], starts=[2], steps=[1]}"},
    {"Split18", 18, "g (float[5] x) => (float[3] y, float[2] z) { y, z = Split<num_outputs = 2>(x) }",
     "y: f32[3] = Slice(x) {axes=[0], ends=[3], starts=[0], steps=[1]}\nz: f32[2] = Slice(x) {axes=[0], "
     "ends=[5], starts=[3], steps=[1]}"},
    // Dropout: rank and counters are state; inference form is the same file
    {"Dropout7", 7, "g (float[N,2] x) => (float[N,2] y) { y = Dropout<ratio = 0.25>(x) }",
     "y: f32[N,2], y.2: bool[N,2] = Dropout(x, rng) {batch=1, key=-5808530484874832556, ratio=0.25}"},
    {"Dropout12", 12,
     "g (float[N,2] x) => (float[N,2] y) <float r = {0.25}, bool t = {1}> { y = Dropout(x, r, t) }",
     "y: f32[N,2], y.2: bool[N,2] = Dropout(x, rng) {batch=1, key=-5808530484874832556, ratio=0.25}"},
    {"Dropout22", 22, "g (float[N,2] x) => (float[N,2] y) <float r = {0}> { y = Dropout(x, r) }",
     "y: f32[N,2] = Identity(x)"},
    // BatchNormalization
    {"BatchNorm7", 7,
     "g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, "
     "float[2] v = {1,1}> { y = BatchNormalization<epsilon = 0.001, momentum = 0.8>(x, s, b, m, v) }",
     "y: f32[N,2], m.next: f32[2], v.next: f32[2] = BatchNormalization(x, s, b, m, v) {epsilon=0.001, "
     "momentum=0.8, training=1}"},
    {"BatchNorm9", 9,
     "g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, "
     "float[2] v = {1,1}> { y, a, c, d, e = BatchNormalization(x, s, b, m, v) }",
     "y: f32[N,2], m.next: f32[2], v.next: f32[2] = BatchNormalization(x, s, b, m, v) {training=1}"},
    {"BatchNorm14", 14,
     "g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, "
     "float[2] v = {1,1}> { y, a, c = BatchNormalization<training_mode = 1>(x, s, b, m, v) }",
     "y: f32[N,2], m.next: f32[2], v.next: f32[2] = BatchNormalization(x, s, b, m, v) {training=1}"},
    {"BatchNorm15", 15,
     "g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, "
     "float[2] v = {1,1}> { y = BatchNormalization(x, s, b, m, v) }",
     "y: f32[N,2], m.next: f32[2], v.next: f32[2] = BatchNormalization(x, s, b, m, v) {training=1}"},
    // products
    {"Gemm7", 7,
     "g (float[N,2] x) => (float[N,3] y) <float[3,2] w = {1,2,3,4,5,6}, float[3] b = {1,2,3}> { y = "
     "Gemm<transB = 1>(x, w, b) }",
     "y: f32[N,3] = Gemm(x, w, b) {transB=1}"},
    {"Gemm11NoC", 11,
     "g (float[N,2] x) => (float[N,3] y) <float[2,3] w = {1,2,3,4,5,6}> { y = Gemm<alpha = 0.5>(x, w) }",
     "y: f32[N,3] = Gemm(x, w) {alpha=0.5}"},
    {"MatMulVector", 13, "g (float[N,2] x) => (float[N] y) <float[2] w = {1,2}> { y = MatMul(x, w) }",
     "y.t: f32[2,1] = Reshape(w) {shape=[2,1]}\ny.2: f32[N,1] = MatMul(x, y.t)\ny: f32[N] = Reshape(y.2) "
     "{shape=[N]}"},
    {"ConvAutoPad", 11,
     "g (float[N,1,5,5] x) => (float[N,1,5,5] y) <float[1,1,2,2] w = {1,2,3,4}> { y = Conv<auto_pad = "
     "\"SAME_UPPER\">(x, w) }",
     "y: f32[N,1,5,5] = Conv(x, w) {pads=[0,0,1,1]}"},
    {"ConvSameLower", 22,
     "g (float[N,1,5,5] x) => (float[N,1,5,5] y) <float[1,1,2,2] w = {1,2,3,4}> { y = Conv<auto_pad = "
     "\"SAME_LOWER\">(x, w) }",
     "y: f32[N,1,5,5] = Conv(x, w) {pads=[1,1,0,0]}"},
    {"MaxPool8", 8,
     "g (float[N,1,4,4] x) => (float[N,1,2,2] y) { y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }",
     "y: f32[N,1,2,2] = MaxPool(x) {kernel_shape=[2,2], strides=[2,2]}"},
    {"MaxPool12", 12,
     "g (float[N,1,5,5] x) => (float[N,1,3,3] y) { y = MaxPool<kernel_shape = [2, 2], strides = [2, 2], "
     "ceil_mode = 1>(x) }",
     "y: f32[N,1,3,3] = MaxPool(x) {ceil_mode=1, kernel_shape=[2,2], strides=[2,2]}"},
    {"AveragePool7", 7,
     "g (float[N,1,4,4] x) => (float[N,1,4,4] y) { y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, "
     "1], count_include_pad = 1>(x) }",
     "y: f32[N,1,4,4] = AveragePool(x) {count_include_pad=1, kernel_shape=[3,3], pads=[1,1,1,1]}"},
    {"GlobalAveragePool", 9, "g (float[N,2,4,4] x) => (float[N,2,1,1] y) { y = GlobalAveragePool(x) }",
     "y: f32[N,2,1,1] = GlobalAveragePool(x)"},
    // shapes
    {"Reshape5", 7, "g (float[N,2,3] x) => (float[N,6] y) <int64[2] s = {0, -1}> { y = Reshape(x, s) }",
     "y: f32[N,6] = Reshape(x) {shape=[N,6]}"},
    {"Reshape14", 14,
     "g (float[N,2,3] x) => (float[M,3] y) { s = Constant<value_ints = [-1, 3]>() y = Reshape(x, s) }",
     "y: f32[2*N,3] = Reshape(x) {shape=[2*N,3]}"},
    {"Flatten9", 9, "g (float[N,2,3] x) => (float[N,6] y) { y = Flatten(x) }", "y: f32[N,6] = Flatten(x)"},
    {"Flatten11", 11, "g (float[N,2,3] x) => (float[M,3] y) { y = Flatten<axis = -1>(x) }",
     "y: f32[2*N,3] = Flatten(x) {axis=-1}"},
    {"Transpose", 7, "g (float[N,2] x) => (float[2,N] y) { y = Transpose(x) }",
     "y: f32[2,N] = Transpose(x) {perm=[1,0]}"},
    {"Concat", 11, "g (float[N,2] x) => (float[N,4] y) { y = Concat<axis = -1>(x, x) }",
     "y: f32[N,4] = Concat(x, x) {axis=1}"},
    {"Cast9", 9, "g (float[2] x) => (double[2] y) { y = Cast<to = 11>(x) }",
     "y: f64[N] = Cast(x) {to=\"f64\"}"},
    {"Cast19", 19, "g (float[2] x) => (int64[2] y) { y = Cast<to = 7, saturate = 1>(x) }",
     "y: i64[N] = Cast(x) {to=\"i64\"}"},
    {"CastLike", 15, "g (float[2] x, double z) => (double[2] y) { y = CastLike(x, z) }",
     "y: f64[N] = Cast(x) {to=\"f64\"}"},
    {"Pow", 12, "g (float[2] x) => (float[2] y) <int64 e = {2}> { y = Pow(x, e) }", "y: f32[N] = Mul(x, x)"},
    {"Gather", 11, "g (int64[N] x) => (float[N,2] y) <float[3,2] w = {1,2,3,4,5,6}> { y = Gather(w, x) }",
     "y: f32[N,2] = Gather(w, x)"},
    {"ArgMax", 11, "g (float[N,3] x) => (int64[N] y) { y = ArgMax<axis = 1, keepdims = 0>(x) }",
     "y: i64[N] = ArgMax(x) {axis=1}"},
};

INSTANTIATE_TEST_SUITE_P(Opsets, Normalises, ::testing::ValuesIn(kCases),
                         [](const auto& c) { return std::string(c.param.what); });

TEST(Import, FollowsShapeArithmetic) {
  const ImportedModel model = import_text(model_text(
      13,
      R"(g (float[N,2,3] x) => (float[M,K] y) <int64 zero = {0}, int64[1] first = {0}, int64[1] minus = {-1}> {
    shape = Shape(x)
    n = Gather(shape, zero)
    n1 = Unsqueeze(n, first)
    to = Concat<axis = 0>(n1, minus)
    y = Reshape(x, to)
  })"));
  EXPECT_EQ(model.graph.value(model.graph.outputs[0].value).type.str(), "f32[N,6]");
  EXPECT_HAS(nodes_of(model.graph), "y: f32[N,6] = Reshape(x) {shape=[N,6]}");
}

TEST(Import, KeepsNamesAndOrigins) {
  const ImportedModel model =
      import_text(model_text(13, R"(g (float[N,2] x) => (float[N,3] y) <float[2,3] w = {1,2,3,4,5,6}> {
    [first] h = MatMul(x, w)
    y = Relu(h)
  })"));
  const ValueId h = model.graph.find("h");
  ASSERT_TRUE(h);
  EXPECT_EQ(model.graph.node(model.graph.value(h).producer).origin, "node 0 'first', MatMul, opset 13");
  EXPECT_EQ(model.graph.outputs[0].name, "y");
  EXPECT_EQ(model.values.at("w"), HostTensor::of<float>({2, 3}, {1, 2, 3, 4, 5, 6}));
}

TEST(Import, ErrorsNameTheNode) {
  const std::string report = report_of([] {
    import_nodes(13,
                 "g (float[N,2] x) => (float[N,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { [fc] y "
                 "= MatMul(x, w) }");
  });
  EXPECT_HAS(report, "inner sizes 2 and 4 differ");
  EXPECT_HAS(report, "text, node 0 'fc', MatMul, opset 13");
  EXPECT_LE(std::count(report.begin(), report.end(), '\n'), 5);
}

TEST(Import, DropsWhatNoOutputNeeds) {
  const ImportedModel model = import_text(
      model_text(13, "g (float[2] x) => (float[2] y) <float[2] w = {1,2}> { dead = Mul(x, w) y = Relu(x) }"));
  EXPECT_EQ(nodes_of(model.graph), "y: f32[N] = Relu(x)");
  EXPECT_EQ(role_of(model, "w").reason, "no path to an output");
}

TEST(Import, InitializersAreNoInputs) {
  const ImportedModel model = import_text(model_text(
      8, "g (float[N,2] x, float[2] w) => (float[N,2] y) <float[2] w = {1,2}> { y = Mul(x, w) }", 3));
  ASSERT_EQ(model.graph.inputs.size(), 1U);
  EXPECT_EQ(model.graph.value(model.graph.inputs[0]).name, "x");
  EXPECT_TRUE(model.values.count("w"));
}

TEST(Import, FixesInputsAndDimensions) {
  const std::string text = model_text(13, "g (float[N,T] x, float k) => (float[N,T] y) { y = Mul(x, k) }");
  ImportOptions options;
  options.inputs["k"] = "0.5";
  options.dims["T"] = 7;
  const ImportedModel model = import_text(text, options);
  EXPECT_EQ(model.graph.inputs.size(), 1U);
  EXPECT_EQ(nodes_of(model.graph), "y: f32[N,7] = Mul(x, k)");
  EXPECT_EQ(model.graph.value(model.graph.find("k")).data->as_double(0), 0.5);
  options.inputs["kk"] = "1";
  EXPECT_HAS(report_of([&] { import_text(text, options); }), "its inputs are: x, k");
  EXPECT_HAS(report_of([&] {
               ImportOptions wrong;
               wrong.dims["Q"] = 1;
               import_text(text, wrong);
             }),
             "its symbolic dimensions are: N, T");
  EXPECT_HAS(report_of([&] {
               ImportOptions wrong;
               wrong.inputs["k"] = "half";
               import_text(text, wrong);
             }),
             "not a number");
}

TEST(Import, EvaluationFormHasNoDropoutAndFixedStatistics) {
  ImportOptions options;
  options.training = false;
  EXPECT_EQ(
      import_nodes(
          14,
          R"(g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, float[2] v = {1,1}> {
    h = BatchNormalization(x, s, b, m, v)
    y = Dropout(h)
  })",
          options),
      "h: f32[N,2] = BatchNormalization(x, s, b, m, v)\ny: f32[N,2] = Identity(h)");
}

TEST(Import, BatchNormModesAndVariance) {
  const std::string fixed =
      "g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, "
      "float[2] v = {1,1}> { y = BatchNormalization(x, s, b, m, v) }";
  ImportOptions options;
  options.bn = "as-file";
  EXPECT_EQ(import_nodes(15, fixed, options), "y: f32[N,2] = BatchNormalization(x, s, b, m, v)");
  options.bn = "eval";
  EXPECT_EQ(import_nodes(15, fixed, options), "y: f32[N,2] = BatchNormalization(x, s, b, m, v)");
  options.bn = "train";
  options.bn_unbiased = false;
  EXPECT_HAS(import_nodes(15, fixed, options), "{training=1, unbiased=0}");
  options.bn = "sometimes";
  EXPECT_HAS(report_of([&] { import_nodes(15, fixed, options); }), "must be train, eval or as-file");
}

TEST(Import, OneBatchNormUsedTwiceUpdatesItsStatisticsInOrder) {
  const ImportedModel model = import_text(model_text(
      15,
      R"(g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, float[2] v = {1,1}> {
    h = BatchNormalization(x, s, b, m, v)
    y = BatchNormalization(h, s, b, m, v)
  })"));
  EXPECT_EQ(
      nodes_of(model.graph),
      "h: f32[N,2], m.next: f32[2], v.next: f32[2] = BatchNormalization(x, s, b, m, v) {training=1}\n"
      "y: f32[N,2], y.2: f32[2], y.3: f32[2] = BatchNormalization(h, s, b, m.next, v.next) {training=1}");
  ASSERT_EQ(model.graph.updates.size(), 2U);
  EXPECT_EQ(model.graph.value(model.graph.updates[0].next).name, "y.2");
}

// ---- functions

constexpr const char* kFunctions = R"(<ir_version: 10, opset_import: ["" : 17, "local" : 1]>
g (float[N,2] x) => (float[N,2] y) {
  a = local.Block(x)
  y = local.Block(a)
}
<domain: "local", opset_import: ["" : 13, "local" : 1]>
Block (x) => (y) {
  w = Constant<value = float[2,2] {1.0, 2.0, 3.0, 4.0}>()
  h = MatMul(x, w)
  y = local.Act<alpha = 2.0>(h)
}
<domain: "local", opset_import: ["" : 13]>
Act <alpha: float = 1.0> (x) => (y) {
  k = Constant<value_float: float = @alpha>()
  s = Mul(x, k)
  y = Relu(s)
}
)";

TEST(Functions, AreInlinedWithTheirAttributesAndShareTheirConstants) {
  const ImportedModel model = import_text(kFunctions);
  EXPECT_EQ(nodes_of(model.graph),
            "a/h: f32[N,2] = MatMul(x, Block/w)\n"
            "a/s: f32[N,2] = Mul(a/h, a/k)\n"
            "a: f32[N,2] = Relu(a/s)\n"
            "y/h: f32[N,2] = MatMul(a, Block/w)\n"
            "y/s: f32[N,2] = Mul(y/h, y/k)\n"
            "y: f32[N,2] = Relu(y/s)");
  EXPECT_EQ(role_of(model, "Block/w").role, Role::parameter);
  EXPECT_EQ(model.graph.value(model.graph.find("a/k")).data->as_double(0), 2.0);
  EXPECT_HAS(model.graph.node(model.graph.order[1]).origin,
             "node 0, Block > node 2, Act > node 1, Mul, opset 13");
}

TEST(Functions, OverloadsAreToldApart) {
  const char* text = R"(<ir_version: 10, opset_import: ["" : 17, "local" : 1]>
g (float[N,2] x) => (float[N,2] y, float[N,2] z) {
  y = local.F:one(x)
  z = local.F:two(x)
}
<domain: "local", overload: "one", opset_import: ["" : 17]>
F (x) => (y) { y = Relu(x) }
<domain: "local", overload: "two", opset_import: ["" : 17]>
F (x) => (y) { y = Tanh(x) }
)";
  EXPECT_EQ(nodes_of(import_text(text).graph), "y: f32[N,2] = Relu(x)\nz: f32[N,2] = Tanh(x)");
}

TEST(Functions, MayPassAnInputThroughAndLeaveInputsOut) {
  const char* text = R"(<ir_version: 10, opset_import: ["" : 17, "local" : 1]>
g (float[N,2] x) => (float[N,2] y, float[N,2] z) {
  y, z = local.F(x)
}
<domain: "local", opset_import: ["" : 17]>
F (x, low) => (x, c) { c = Clip(x, low) }
)";
  EXPECT_EQ(nodes_of(import_text(text).graph), "z: f32[N,2] = Clip(x)\ny: f32[N,2] = Identity(x)");
}

TEST(Functions, OfOnnxAreInlinedWhereThereIsNoEntry) {
  const ImportedModel model =
      import_text(model_text(20, "g (float[N,4] x) => (float[N,4] y) { y = HardSwish(x) }"));
  EXPECT_EQ(model.graph.value(model.graph.outputs[0].value).type.str(), "f32[N,4]");
  EXPECT_TRUE(model.graph.find("y"));
}

TEST(Functions, OfOnnxThatDependOnTypesAreInlinedToo) {
  const ImportedModel model =
      import_text(model_text(20, "g (float[N,4] x) => (float[N,4] y) { y = Celu<alpha = 2.0>(x) }"));
  EXPECT_EQ(model.graph.value(model.graph.outputs[0].value).type.str(), "f32[N,4]");
}

// ---- symbolic batch

TEST(Batch, NamesAreKept) {
  const ImportedModel model = import_text(
      model_text(13, "g (float[\"batch-size\",2] x) => (float[\"batch-size\",2] y) { y = Relu(x) }"));
  EXPECT_EQ(model.batch_symbol, "batch_size");
  EXPECT_EQ(nodes_of(model.graph), "y: f32[batch_size,2] = Relu(x)");
  EXPECT_TRUE(model.notes.empty());
}

TEST(Batch, AFixedOneBecomesSymbolicThroughReshape) {
  const ImportedModel model = import_text(model_text(
      13,
      R"(g (float[1,2,3] x) => (float[1,1] y) <int64[2] s = {1, 6}, float[6,1] w = {1,2,3,4,5,6}, float[3] c = {1,2,3}, int64[3] t = {1, 1, 3}> {
    k = Reshape(c, t)
    a = Add(x, k)
    h = Reshape(a, s)
    y = MatMul(h, w)
  })"));
  EXPECT_HAS(nodes_of(model.graph), "h: f32[N,6] = Reshape(a) {shape=[N,6]}");
  EXPECT_HAS(nodes_of(model.graph), "k: f32[1,1,3] = Reshape(c) {shape=[1,1,3]}");
  ASSERT_EQ(model.notes.size(), 1U);
  EXPECT_EQ(model.notes[0], "batch dimension 1 made symbolic (N)");
}

TEST(Batch, ALargerOneInReshapeAndExpand) {
  const ImportedModel model = import_text(model_text(
      13,
      R"(g (float[4,2,3] x) => (float[4,3,3] y) <float[1,1,3] c = {1,2,3}, int64[3] e = {4, 1, 3}, int64[2] flat = {8, 3}, int64[3] back = {4, 2, 3}> {
    f = Reshape(x, flat)
    r = Relu(f)
    b = Reshape(r, back)
    k = Expand(c, e)
    y = Concat<axis = 1>(b, k)
  })"));
  EXPECT_HAS(nodes_of(model.graph), "f: f32[2*N,3] = Reshape(x) {shape=[2*N,3]}");
  EXPECT_HAS(nodes_of(model.graph), "y: f32[N,3,3] = Concat(b, k) {axis=1}");
  EXPECT_EQ(model.notes.at(0), "batch dimension 4 made symbolic (N)");
}

TEST(Batch, AnExpandToOneIsTriedWhereItMustFollow) {
  const ImportedModel model = import_text(model_text(
      13, R"(g (float[1,2,3] x) => (float[1,3,3] y) <float[1,1,3] c = {1,2,3}, int64[3] e = {1, 1, 3}> {
    k = Expand(c, e)
    y = Concat<axis = 1>(x, k)
  })"));
  EXPECT_HAS(nodes_of(model.graph), "k: f32[N,1,3] = Expand(c) {shape=[N,1,3]}");
}

TEST(Batch, StaysFixedWhereConstantsDoNotAllowIt) {
  const ImportedModel model = import_text(
      model_text(13, "g (float[2,3] x) => (float[2,3] y) <float[2,3] k = {1,2,3,4,5,6}> { y = Add(x, k) }"));
  EXPECT_EQ(nodes_of(model.graph), "y: f32[2,3] = Add(x, k)");
  ASSERT_EQ(model.notes.size(), 1U);
  EXPECT_HAS(model.notes[0], "the batch dimension stays fixed at 2: ");
}

TEST(Batch, CanBeGivenAfterwards) {
  ImportOptions options;
  options.dims["N"] = 5;
  const ImportedModel model =
      import_text(model_text(13, "g (float[1,2] x) => (float[1,2] y) { y = Relu(x) }"), options);
  EXPECT_EQ(nodes_of(model.graph), "y: f32[5,2] = Relu(x)");
}

}  // namespace
}  // namespace onnxddp::testing

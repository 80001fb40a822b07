// The registry's entries are complete, and their type and folding rules give the expected text.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "graph/attributes.h"
#include "graph/op.h"
#include "graph/pass.h"
#include "graph/passes/passes.h"
#include "graph/registry.h"
#include "graph/text.h"

namespace onnxddp {
namespace {

class EveryOp : public ::testing::TestWithParam<const OpDef*> {};

TEST_P(EveryOp, IsComplete) {
  const OpDef& op = *GetParam();
  EXPECT_FALSE(op.signature.empty());
  EXPECT_NO_THROW(parse_signature(op.signature));
  EXPECT_TRUE(op.infer != nullptr);
  EXPECT_TRUE(op.gradient != nullptr);
  EXPECT_FALSE(op.samples.empty());
  EXPECT_TRUE(gradient_kind(op) != GradientKind::decomposition || op.decompose);
  EXPECT_TRUE(!op.onnx.import || op.onnx.since > 0);
  EXPECT_TRUE(!op.traits.collective || op.traits.lane == Lane::comm);
  std::set<std::string> names;
  for (const AttrSpec& spec : op.attrs) EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
}

TEST_P(EveryOp, InPlacePairsNameOperands) {
  const OpDef& op = *GetParam();
  const Signature& signature = signature_of(op);
  for (const auto& [input, output] : op.traits.in_place) {
    EXPECT_GE(input, 0);
    EXPECT_LT(input, static_cast<int>(signature.inputs.size()));
    EXPECT_LT(output, static_cast<int>(signature.outputs.size()));
  }
  for (const int output : op.traits.nondifferentiable_outputs)
    EXPECT_LT(output, static_cast<int>(signature.outputs.size()));
}

TEST_P(EveryOp, SamplesParseInBothFloatTypes) {
  for (const std::string& text : GetParam()->samples) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Sample sample = parse_sample(text, dtype);
      EXPECT_NO_THROW(verify(sample.graph)) << text;
      EXPECT_FALSE(sample.graph.outputs.empty()) << text;
      const std::string dumped = dump(sample.graph);
      EXPECT_EQ(dump(parse(dumped)), dumped) << text;
    }
  }
}

/// The decomposition's results have the types that infer says.
TEST_P(EveryOp, DecompositionHasTheSameTypes) {
  const OpDef& op = *GetParam();
  if (!op.decompose) return;
  for (const std::string& text : op.samples) {
    Sample sample = parse_sample(text);
    const Node node = sample.graph.node(sample.graph.order.at(0));
    Builder builder(sample.graph);
    Compose compose(builder, node);
    op.decompose(compose);
    for (std::size_t i = 0; i < node.outputs.size(); ++i) {
      ASSERT_TRUE(compose.results()[i]) << text << " leaves out output " << i;
      EXPECT_EQ(sample.graph.value(compose.results()[i]).type, sample.graph.value(node.outputs[i]).type)
          << text;
    }
    EXPECT_NO_THROW(verify(sample.graph)) << text;
  }
}

/// The gradient rule's results fit the inputs, up to broadcasting.
TEST_P(EveryOp, GradientFitsTheInputs) {
  const OpDef& op = *GetParam();
  if (gradient_kind(op) != GradientKind::rule) return;
  for (const std::string& text : op.samples) {
    Sample sample = parse_sample(text);
    const Node node = sample.graph.node(sample.graph.order.at(0));
    if (!is_float(sample.graph.value(node.outputs[0]).type.dtype)) continue;
    if (!is_float(sample.graph.value(node.inputs[0]).type.dtype) && op.name != "Where") continue;
    std::vector<ValueId> dys;
    for (std::size_t i = 0; i < node.outputs.size(); ++i)
      dys.push_back(
          sample.graph.add_input("dy" + std::to_string(i), sample.graph.value(node.outputs[i]).type));
    Builder builder(sample.graph);
    Gradient gradient(builder, node, dys);
    op.gradient(gradient);
    EXPECT_FALSE(gradient.results().empty()) << text;
    for (const Gradient::Piece& piece : gradient.results()) {
      if (!piece.whole) continue;
      const TensorType& type = sample.graph.value(node.inputs[piece.input]).type;
      EXPECT_EQ(sum_to(piece.value, type.shape).type(), type) << text << " input " << piece.input;
    }
    EXPECT_NO_THROW(verify(sample.graph)) << text;
  }
}

TEST_P(EveryOp, CountsItsWork) {
  const OpDef& op = *GetParam();
  if (!op.flops) return;
  Sample sample = parse_sample(op.samples[0]);
  const Node& node = sample.graph.node(sample.graph.order.at(0));
  EXPECT_GT(op.flops(Inference(sample.graph, op, node.inputs, node.attrs)).value(), 0);
}

INSTANTIATE_TEST_SUITE_P(Ops, EveryOp, ::testing::ValuesIn(all_ops()),
                         [](const ::testing::TestParamInfo<const OpDef*>& param) {
                           return param.param->name;
                         });

/// The types of the sample's outputs, e.g. "f32[2,3] bool[2,3]".
std::string types_of(std::string_view sample) {
  std::string text;
  const Sample parsed = parse_sample(sample);
  for (const Output& output : parsed.graph.outputs)
    text += (text.empty() ? "" : " ") + parsed.graph.value(output.value).type.str();
  return text;
}

std::string failure_of(std::string_view sample) {
  try {
    return "no error: " + types_of(sample);
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(OpsInfer, ShapesOfConvolution) {
  EXPECT_EQ(types_of("Conv(f32[N,3,32,32], f32[16,3,3,3], f32[16]) {pads=[1,1,1,1], strides=[2,2]}"),
            "f32[N,16,16,16]");
  EXPECT_EQ(types_of("Conv(f32[N,4,H,9], f32[8,2,3,3]) {group=2}"), "f32[N,8,H-2,7]");
  EXPECT_EQ(types_of("Conv(f32[1,1,9,9], f32[1,1,3,3]) {dilations=[2,3]}"), "f32[1,1,5,3]");
  EXPECT_EQ(failure_of("Conv(f32[1,64,9,9], f32[8,32,3,3])"),
            "Conv: expects 32 input channels, x has 64 (group=1)");
}

TEST(OpsInfer, CeilModeDropsAWindowThatStartsInTheTrailingPads) {
  EXPECT_EQ(types_of("MaxPool(f32[1,1,5,6]) {kernel_shape=[2,2], strides=[2,2], ceil_mode=1}"),
            "f32[1,1,3,3]");
  EXPECT_EQ(
      types_of("MaxPool(f32[1,1,5,4]) {kernel_shape=[2,2], strides=[2,2], pads=[0,0,1,1], ceil_mode=1}"),
      "f32[1,1,3,2]");
  EXPECT_EQ(types_of("MaxPool(f32[1,1,H,4]) {kernel_shape=[3,2], strides=[2,2], ceil_mode=1}"),
            "f32[1,1,floor(H-2,2)+1,2]");
}

TEST(OpsInfer, SlicesWithNegativeStepsReachTheFirstElement) {
  EXPECT_EQ(types_of("Slice(f32[5]) {axes=[0], starts=[4], ends=[-1], steps=[-1]}"), "f32[5]");
  EXPECT_EQ(types_of("Slice(f32[5]) {axes=[0], starts=[4], ends=[-1], steps=[-3]}"), "f32[2]");
  EXPECT_EQ(types_of("Slice(f32[5]) {axes=[0], starts=[3], ends=[3], steps=[1]}"), "f32[0]");
  EXPECT_EQ(types_of("Slice(f32[N,5]) {axes=[0], starts=[1], ends=[N], steps=[1]}"), "f32[N-1,5]");
  EXPECT_EQ(failure_of("Slice(f32[5]) {axes=[0], starts=[0], ends=[6], steps=[1]}"),
            "Slice: end 6 is not in 0..5");
}

TEST(OpsInfer, SymbolicSizes) {
  EXPECT_EQ(types_of("MatMul(f32[N,2,3], f32[3,4])"), "f32[N,2,4]");
  EXPECT_EQ(types_of("Concat(f32[N,3], f32[M,3]) {axis=0}"), "f32[M+N,3]");
  EXPECT_EQ(types_of("Flatten(f32[N,16,5,5])"), "f32[N,400]");
  EXPECT_EQ(types_of("Reshape(f32[N,4,8]) {shape=[4*N,8]}"), "f32[4*N,8]");
  EXPECT_EQ(types_of("BatchStats(f32[N,C,7,7])"), "f32[2*C+2]");
  EXPECT_EQ(failure_of("Reshape(f32[2,3]) {shape=[7]}"), "Reshape: cannot reshape [2,3] to [7]");
  EXPECT_EQ(failure_of("MatMul(f32[2,3], f32[4,5])"), "MatMul: inner sizes 3 and 4 differ");
}

TEST(OpsInfer, SeveralOutputs) {
  EXPECT_EQ(types_of("Dropout(f32[2,3], i64[5]) {key=1}"), "f32[2,3] bool[2,3]");
  EXPECT_EQ(types_of("Split(f32[2,5]) {axis=1, split=[2,3]}"), "f32[2,2] f32[2,3]");
  EXPECT_EQ(types_of("SgdUpdate(f32[3], f32[3], f64[5])"), "f32[3]");
  EXPECT_EQ(types_of("AdamUpdate(f32[3], f32[3], f64[6], f32[3], f32[3])"), "f32[3] f32[3] f32[3]");
}

/// Dumps what is left of a chain of shape arithmetic: its contents as a constant.
std::string folded(std::string_view text) {
  Graph graph = parse(text);
  verify(graph);
  canonicalise(graph);
  EXPECT_TRUE(graph.order.empty()) << dump(graph);
  return shape_str(graph.value(graph.outputs.at(0).value).ints.value_or(Dims{-99}));
}

TEST(OpsFold, ViewOfAFlattenedBatch) {
  EXPECT_EQ(folded(R"(graph g v1
    input x: f32[N,3,8]
    const zero: i64[] = [0]
    const axes: i64[1] = [0]
    const rest: i64[1] = [24]
      s: i64[3] = Shape(x)
      n: i64[] = Gather(s, zero)
      u: i64[1] = Unsqueeze(n) {axes=[0]}
      y: i64[2] = Concat(u, rest) {axis=0}
    output y
  )"),
            "[N,24]");
}

TEST(OpsFold, ArithmeticOnSizes) {
  EXPECT_EQ(folded(R"(graph g v1
    input x: f32[N,3,8]
    const two: i64[] = [2]
    const ends: i64[1] = [2]
      s: i64[1] = Shape(x) {start=0, end=1}
      d: i64[1] = Shape(x) {start=-1}
      m: i64[1] = Mul(s, d)
      h: i64[1] = Div(m, two)
      a: i64[1] = Add(h, two)
      y: i64[1] = Sub(a, s)
    output y
  )"),
            "[3*N+2]");
}

TEST(OpsFold, DivisionOfIntegersTruncates) {
  EXPECT_EQ(folded(R"(graph g v1
    const a: i64[3] = [7, -7, 6]
    const b: i64[3] = [2, 2, -4]
      y: i64[3] = Div(a, b)
    output y
  )"),
            "[3,-3,-1]");
}

TEST(OpsFold, ExpandIdiomOfExporters) {  // where(shape == -1, ones, shape)
  EXPECT_EQ(folded(R"(graph g v1
    input x: f32[N,1,8]
    const three: i64[1] = [3]
    const minus: i64[1] = [-1]
    const shape3: i64[1] = [3]
      ones: i64[3] = ConstantOfShape(shape3) {value=1, to="i64"}
      s: i64[1] = Shape(x) {end=1}
      given: i64[3] = Concat(s, three, minus) {axis=0}
      is: bool[3] = Equal(given, minus)
      y: i64[3] = Where(is, ones, given)
    output y
  )"),
            "[N,3,1]");
}

TEST(OpsFold, SliceRangeReshapeCastAndProduct) {
  EXPECT_EQ(folded(R"(graph g v1
    const a: i64[] = [6]
    const b: i64[] = [-3]
    const c: i64[] = [-2]
      r: i64[5] = Range(a, b, c)
      t: i64[3] = Slice(r) {axes=[0], starts=[2], ends=[-1], steps=[-1]}
      i: i64[3,1] = Reshape(t) {shape=[3,1]}
      q: i64[3] = Squeeze(i) {axes=[1]}
      k: i32[3] = Cast(q) {to="i32"}
      y: i32[3] = Identity(k)
    output y
  )"),
            "[2,4,6]");
  EXPECT_EQ(folded(R"(graph g v1
    input x: f32[N,3,8]
      s: i64[3] = Shape(x)
      y: i64[] = ReduceProd(s) {axes=[0], keepdims=0}
    output y
  )"),
            "[24*N]");
  EXPECT_EQ(folded(R"(graph g v1
    input x: f32[N,3]
      s: i64[1] = Shape(x) {end=1}
      y: i64[4] = Expand(s) {shape=[4]}
    output y
  )"),
            "[N,N,N,N]");
}

TEST(OpsFold, GatherOutOfRangeIsAnError) {
  EXPECT_THROW(parse_sample("Gather(i64[3]=[1,2,3], i64[1]=[3])"), Error);
}

TEST(OpsGradient, BatchStatisticsBelongToTheRegion) {
  const auto rule_text = [](std::string_view producer) {
    Graph graph = parse(cat(R"(graph g v1
      input  x: f32[N,2,4,4]
      state  mean: f32[2]
      state  var: f32[2]
      param  w: f32[2]
      param  b: f32[2]
        s: f32[6] = )",
                            producer, R"(
        y: f32[N,2,4,4] = BatchNormApply(x, w, b, s)
        loss: f32[] = ReduceSum(y) {axes=[0,1,2,3], keepdims=0}
      output loss
    )"));
    Builder builder(graph);
    const Node node = graph.node(graph.order.at(1));
    Gradient gradient(builder, node, {graph.add_input("dy", graph.value(node.outputs[0]).type)});
    node.op->gradient(gradient);
    EXPECT_EQ(gradient.results().size(), 3U);  // x, scale, bias; the statistics receive none
    return graph.node(graph.value(gradient.results()[0].value.id()).producer).inputs.size();
  };
  EXPECT_EQ(rule_text("BatchStats(x)"), 6U);
  EXPECT_EQ(rule_text("FixedStats(mean, var)"), 4U);
}

}  // namespace
}  // namespace onnxddp

#include "graph/passes/passes.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

const auto kAutodiff = [](Graph& graph) { autodiff(graph); };

TEST(Autodiff, AddsTheContributionsOfEveryUse) {
  EXPECT_GRAPH(kAutodiff, R"(
    graph g v1
    param  w: f32[3]
      a: f32[3] = Mul(w, w)
      loss: f32[] = ReduceSum(a) {axes=[0], keepdims=0}
    output loss
  )",
               R"(
    graph g v1
    param  w: f32[3]
    const  c.1: f32[] = [1]
      a: f32[3] = Mul(w, w)
      loss: f32[] = ReduceSum(a) {axes=[0], keepdims=0}
      loss.bw: f32[1] = Reshape(c.1) {shape=[1]}
      a.grad: f32[3] = Expand(loss.bw) {shape=[3]}
      w.grad: f32[3] = Mul(a.grad, w)
      w.grad.2: f32[3] = Mul(a.grad, w)
      w.grad.sum: f32[3] = Add(w.grad, w.grad.2)
    output loss
    output w.grad = w.grad.sum
  )");
}

TEST(Autodiff, SumsOverBroadcastAxes) {
  EXPECT_GRAPH(kAutodiff, R"(
    graph g v1
    input  x: f32[N,3]
    param  b: f32[3]
      y: f32[N,3] = Add(x, b)
      loss: f32[] = ReduceSum(y) {axes=[0,1], keepdims=0}
    output loss
  )",
               R"(
    graph g v1
    input  x: f32[N,3]
    param  b: f32[3]
    const  c.1: f32[] = [1]
      y: f32[N,3] = Add(x, b)
      loss: f32[] = ReduceSum(y) {axes=[0,1], keepdims=0}
      loss.bw: f32[1,1] = Reshape(c.1) {shape=[1,1]}
      y.grad: f32[N,3] = Expand(loss.bw) {shape=[N,3]}
      b.grad: f32[3] = SumTo(y.grad) {shape=[3]}
    output loss
    output b.grad
  )");
}

TEST(Autodiff, AssemblesSlicesOnce) {
  Graph graph = parse(testing::unindent(R"(
    graph g v1
    param  w: f32[4]
      a: f32[2] = Slice(w) {axes=[0], ends=[2], starts=[0], steps=[1]}
      b: f32[2] = Slice(w) {axes=[0], ends=[4], starts=[2], steps=[1]}
      c: f32[2] = Mul(a, b)
      loss: f32[] = ReduceSum(c) {axes=[0], keepdims=0}
    output loss
  )"));
  autodiff(graph);
  EXPECT_LINES(dump(graph), {"w.grad: f32[4] = SumPieces(", testing::absent("Add("), "output w.grad"});
}

TEST(Autodiff, LeavesUnreachedParametersWithoutGradient) {
  Graph graph =
      parse("graph g v1\nparam w: f32[]\nparam unused: f32[]\nloss: f32[] = Mul(w, w)\noutput loss\n");
  autodiff(graph);
  const auto found = gradients(graph);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(graph.value(found[0].first).name, "w");
}

TEST(Autodiff, NamesTheParametersBehindAnOpWithoutGradient) {
  const OpDef opaque = {.name = "Opaque",
                        .signature = "(x: float) -> y",
                        .onnx = {},
                        .infer = same_as_first_input,
                        .gradient = not_differentiable,
                        .samples = {}};
  const Registry registry(std::span(&opaque, 1));
  Graph graph = parse("graph g v1\nparam w: f32[]\na: f32[] = Opaque(w)\nloss: f32[] = Exp(a)\noutput loss\n",
                      {}, registry);
  try {
    autodiff(graph);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(error.report().find("op Opaque has no gradient, and parameters are reached through it: w"),
              std::string::npos)
        << error.report();
  }
}

}  // namespace
}  // namespace onnxddp

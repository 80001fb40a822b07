#include "graph/passes/passes.h"

#include <cmath>

#include "graph/passes/options.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

TEST(Simplify, MergesEqualNodesAndDropsIdentities) {
  EXPECT_GRAPH([](Graph& g) { simplify(g); }, R"(
    graph g v1
    input  x: f32[2,3]
    const  one: f32[] = [1]
      a: f32[2,3] = Relu(x)
      b: f32[2,3] = Relu(x)
      c: f32[2,3] = Mul(b, one)
      d: f32[6] = Reshape(c) {shape=[6]}
      e: f32[3,2] = Reshape(d) {shape=[3,2]}
      dead: f32[2,3] = Exp(x)
      f: f32[2,3] = Add(a, c)
    output e
    output f
  )",
               R"(
    graph g v1
    input  x: f32[2,3]
      a: f32[2,3] = Relu(x)
      e: f32[3,2] = Reshape(a) {shape=[3,2]}
      f: f32[2,3] = Add(a, a)
    output e
    output f
  )");
}

TEST(Simplify, NeverMergesRandomNodes) {
  constexpr const char* kText = R"(
    graph g v1
    input  x: f32[2]
    state  rng: i64[5]
      a: f32[2] = Dropout(x, rng) {key=7, ratio=0.25}
      b: f32[2] = Dropout(x, rng) {key=7, ratio=0.25}
      y: f32[2] = Add(a, b)
    output y
  )";
  EXPECT_UNCHANGED([](Graph& g) { simplify(g); }, kText);
}

TEST(Canonicalise, TurnsKnownContentsIntoConstants) {
  EXPECT_GRAPH(canonicalise, R"(
    graph g v1
    input  x: f32[N,3]
      s: i64[2] = Shape(x)
      y: f32[3*N,1] = Flatten(x) {axis=2}
    output s
  )",
               R"(
    graph g v1
    input  x: f32[N,3]
    const  s.value: i64[2] = [N, 3]
    output s = s.value
  )");
}

TEST(AttachLoss, MseIsASumOverACount) {
  Graph graph = parse("graph g v1\ninput x: f32[N,2]\nparam w: f32[2]\ny: f32[N,2] = Mul(x, w)\noutput y\n");
  const LossInfo info = attach_loss(graph, "mse", {}, "", "t", TensorType::parse("f32[N,2]"));
  EXPECT_EQ(info.count, Dim::symbol("N") * 2);
  EXPECT_LINES(dump(graph), {"input  t: f32[N,2]", "state  loss.denominator: f32[]", "Sub(y, t)",
                             "Div(loss.t", "output loss"});
}

TEST(AttachLoss, CrossEntropySkipsAFinalSoftmaxAndCountsKeptTargets) {
  Graph graph = parse("graph g v1\ninput x: f32[N,5]\ny: f32[N,5] = Softmax(x) {axis=1}\noutput y\n");
  const LossInfo info =
      attach_loss(graph, "cross_entropy", {{"ignore_index", "-100"}}, "", "t", TensorType::parse("i64[N]"));
  EXPECT_FALSE(info.static_count);
  EXPECT_EQ(info.notes.size(), 1U);
  EXPECT_LINES(dump(graph),
               {"loss.count: f32[] = CountTargets(t)", "loss.sum: f32[] = CrossEntropyLoss(x, t)"});
}

TEST(AttachLoss, ChoosesTheClassAxis) {
  const auto axis = [](const char* output, const char* target) {
    Graph graph = parse(cat("graph g v1\ninput x: ", output, "\ny: ", output, " = Relu(x)\noutput y\n"));
    attach_loss(graph, "cross_entropy", {}, "", "t", TensorType::parse(target));
    const std::string text = dump(graph);
    const std::size_t at = text.find("CrossEntropyLoss(y, t)");
    const std::string rest = text.substr(at + 22, text.find('\n', at) - at - 22);
    return rest.empty() ? std::string("1") : rest.substr(rest.find('=') + 1, 1);  // 1 is the default
  };
  EXPECT_EQ(axis("f32[N,10]", "i64[N]"), "1");
  EXPECT_EQ(axis("f32[N,7,50]", "i64[N,7]"), "2");
  EXPECT_EQ(axis("f32[N,5,5]", "i64[N,5]"), "1");
  EXPECT_EQ(axis("f32[N,3,8,8]", "i64[N,8,8]"), "1");
  EXPECT_THROW(axis("f32[N,3,8,8]", "i64[N]"), Error);
}

TEST(DefaultLoss, FollowsOutputAndTarget) {
  const auto loss = [](const char* output, const char* target, bool binary = false) {
    const Graph graph =
        parse(cat("graph g v1\ninput x: ", output, "\ny: ", output, " = Sigmoid(x)\noutput y\n"));
    return default_loss(graph, "", TensorType::parse(target), binary, false, nullptr);
  };
  EXPECT_EQ(loss("f32[N,10]", "i64[N]"), "cross_entropy");
  EXPECT_EQ(loss("f32[N,10]", "f32[N,10]"), "mse");
  EXPECT_EQ(loss("f32[]", "bool[]"), "graph");
  try {
    loss("f32[N,1]", "f32[N,1]", true);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(error.report().find("bce"), std::string::npos);
    EXPECT_NE(error.report().find("--loss"), std::string::npos);
  }
}

TEST(Guard, ClipsByTheGlobalNorm) {
  Graph graph = parse(testing::unindent(R"(
    graph g v1
    param  w: f32[2]
      loss: f32[] = SumSquares(w)
      g: f32[2] = Neg(w)
    output loss
    output w.grad = g
  )"));
  guard(graph, {.clip_norm = 1.0});
  EXPECT_LINES(dump(graph),
               {"grad_norm.squared: f32[] = SumSquares(g)", "grad_norm: f32[] = Sqrt(", "Clip(",
                "w.clipped: f32[2] = Mul(g, clip.3)", "output w.grad = w.clipped", "output grad_norm"});
}

TEST(Accumulate, AddsIntoStatesAndResetsThem) {
  const std::string text = testing::unindent(R"(
    graph g v1
    param  w: f32[2]
      loss: f32[] = SumSquares(w)
      g: f32[2] = Neg(w)
    output loss
    output w.grad = g
  )");
  Graph micro = parse(text);
  accumulate_micro(micro);
  EXPECT_LINES(dump(micro),
               {"state  w.acc: f32[2]", "w.acc.next: f32[2] = Add(w.acc, g)", "update w.acc <- w.acc.next",
                "update loss.acc <- loss.acc.next", testing::absent("output w.grad")});
  Graph step = parse(text);
  accumulate_step(step);
  EXPECT_LINES(dump(step), {"w.acc.total: f32[2] = Add(w.acc, g)", "update w.acc <- w.zero",
                            "output loss = loss.acc.total", "output w.grad = w.acc.total"});
}

TEST(AttachOptimizer, AddsStatesAndUpdates) {
  Graph graph = parse(testing::unindent(R"(
    graph g v1
    param  w: f32[2]
      g: f32[2] = Neg(w)
    output w.grad = g
  )"));
  attach_optimizer(graph, {"sgd", {{"momentum", "0.9"}}});
  EXPECT_EQ(dump(graph), testing::unindent(R"(
    graph g v1
    param  w: f32[2]
    state  optimizer.group0: f64[5]
    state  w.velocity: f32[2]
      g: f32[2] = Neg(w)
      w.next: f32[2], w.velocity.next: f32[2] = SgdUpdate(w, g, optimizer.group0, w.velocity)
    update w <- w.next
    update w.velocity <- w.velocity.next
  )"));
}

TEST(Options, RefuseWhatTheyDoNotKnow) {
  EXPECT_THROW(hyper_defaults({"sgd", {{"momentun", "0.9"}}}), Error);
  EXPECT_THROW(hyper_defaults({"sgd", {{"momentum", "much"}}}), Error);
  EXPECT_THROW(hyper_defaults({"sgd", {{"nesterov", "true"}}}), Error);
  EXPECT_THROW(hyper_defaults({"adam", {{"beta1", "1"}}}), Error);
  EXPECT_THROW(hyper_defaults({"admm", {}}), Error);
  EXPECT_EQ(hyper_defaults({"adamw", {{"eps", "1e-6"}}}), (std::vector<double>{0.9, 0.999, 1e-6, 0.01}));
}

std::vector<double> rates(const ScheduleSpec& spec, int count, std::int64_t warmup = 0) {
  std::vector<double> out;
  for (int i = 0; i < count; ++i) out.push_back(schedule_lr(spec, 0.1, i, 2, count, warmup));
  return out;
}

// The goldens of PyTorch 2.15 for base rate 0.1.
TEST(Schedule, EqualsTorch) {
  const auto expect = [](const std::vector<double>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
  };
  expect(rates({"step", {{"step_size", "2"}, {"gamma", "0.5"}}}, 6), {.1, .1, .05, .05, .025, .025});
  expect(rates({"cosine", {{"t_max", "5"}, {"eta_min", "0.01"}}}, 8),
         {.1, .0914057647469, .0689057647469, .0410942352531, .0185942352531, .01, .0185942352531,
          .0410942352531});
  expect(rates({"constant", {}}, 4, 2), {.05, .1, .1, .1});
  expect(rates({"step", {{"step_size", "1"}, {"gamma", "0.5"}, {"unit", "epoch"}}}, 5),
         {.1, .1, .05, .05, .025});
  EXPECT_THROW(check_schedule({"step", {}}), Error);
  EXPECT_THROW(check_schedule({"cosine", {{"tmax", "5"}}}), Error);
}

}  // namespace
}  // namespace onnxddp

#include "distributed/distribute.h"

#include "graph/passes/passes.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

std::function<void(Graph&)> two_ranks(bool sync = false) {
  return [sync](Graph& graph) {
    distribute(graph, {.ranks = 2, .sync_batch_norm = sync, .extra = {"loss"}, .stop_flag = false});
  };
}

constexpr const char* kLinear = R"(
    graph g v1
    input  x: f32[2,3]
    param  w: f32[3]
    param  b: f32[3]
      loss: f32[] = SumSquares(w)
      w.grad: f32[3] = SumTo(x) {shape=[3]}
      b.grad: f32[3] = Neg(w)
      tail: f32[3] = Neg(b)
    output loss
    output w.grad
    output b.grad
    output tail
  )";

TEST(Distribute, LeavesSingleRankGraphsAlone) {
  EXPECT_UNCHANGED([](Graph& graph) { distribute(graph, {.ranks = 1}); }, kLinear);
}

TEST(Distribute, ReducesABucketRightBehindItsLastGradientWithTheLoss) {
  EXPECT_GRAPH(two_ranks(), kLinear, R"(
    graph g v1
    input  x: f32[2,3]
    param  w: f32[3]
    param  b: f32[3]
      loss: f32[] = SumSquares(w)
      w.grad: f32[3] = SumTo(x) {shape=[3]}
      b.grad: f32[3] = Neg(w)
      w.sum: f32[3], b.sum: f32[3], loss.total: f32[] = AllReduce(w.grad, b.grad, loss)
      tail: f32[3] = Neg(b)
    output loss = loss.total
    output w.grad = w.sum
    output b.grad = b.sum
    output tail
  )");
}

constexpr const char* kBatchNorm = R"(
    graph g v1
    input  x: f32[N,4,2,2]
    input  dy: f32[N,4,2,2]
    param  scale: f32[4]
    param  bias: f32[4]
    state  mean: f32[4]
    state  var: f32[4]
      stats: f32[10] = BatchStats(x)
      y: f32[N,4,2,2] = BatchNormApply(x, scale, bias, stats) {epsilon=1e-05}
      mean.next: f32[4], var.next: f32[4] = RunningStats(mean, var, stats) {momentum=0.9}
      bias.grad: f32[4], scale.grad: f32[4] = BatchNormGradSums(dy, x, stats) {epsilon=1e-05}
      x.grad: f32[N,4,2,2] = BatchNormGradApply(dy, x, scale, stats, bias.grad, scale.grad) {epsilon=1e-05}
      loss: f32[] = SumSquares(y, x.grad)
    update mean <- mean.next
    update var <- var.next
    output loss
    output scale.grad
    output bias.grad
  )";

TEST(Distribute, SyncBatchNormGathersStatisticsOnceAndReducesTheSums) {
  Graph graph = parse(testing::unindent(kBatchNorm));
  two_ranks(true)(graph);
  const std::string text = dump(graph);
  EXPECT_LINES(
      text,
      {"stats: f32[10] = BatchStats(x)",
       testing::next_line("stats.all: f32[2,10] = AllGather(stats) {ranks=2}"),
       testing::next_line("stats.merged: f32[10] = MergeStats(stats.all)"),
       "BatchNormApply(x, scale, bias, stats.merged)", "RunningStats(mean, var, stats.merged)",
       "BatchNormGradSums(dy, x, stats.merged)",
       testing::next_line("bias.grad.sum: f32[4], scale.grad.sum: f32[4] = AllReduce(bias.grad, scale.grad)"),
       "BatchNormGradApply(dy, x, scale, stats.merged, bias.grad.sum, scale.grad.sum)",
       "loss.total: f32[] = AllReduce(loss)", "output scale.grad = scale.grad.sum"});
}

// A residual block's shortcut: a and b lie side by side, c behind both.
TEST(Distribute, SiblingBatchNormsShareOneGatherAndOneReduction) {
  Graph graph = parse(testing::unindent(R"(
    graph g v1
    input  x: f32[N,4,2,2]
    input  dy: f32[N,4,2,2]
    param  scale: f32[4]
    param  bias: f32[4]
      a.stats: f32[10] = BatchStats(x)
      a: f32[N,4,2,2] = BatchNormApply(x, scale, bias, a.stats) {epsilon=1e-05}
      r: f32[N,4,2,2] = Relu(a)
      b.stats: f32[10] = BatchStats(dy)
      b: f32[N,4,2,2] = BatchNormApply(dy, scale, bias, b.stats) {epsilon=1e-05}
      c.stats: f32[10] = BatchStats(r)
      c: f32[N,4,2,2] = BatchNormApply(r, scale, bias, c.stats) {epsilon=1e-05}
      b.bias: f32[4], b.scale: f32[4] = BatchNormGradSums(c, dy, b.stats) {epsilon=1e-05}
      b.grad: f32[N,4,2,2] = BatchNormGradApply(c, dy, scale, b.stats, b.bias, b.scale) {epsilon=1e-05}
      a.bias: f32[4], a.scale: f32[4] = BatchNormGradSums(c, x, a.stats) {epsilon=1e-05}
      a.grad: f32[N,4,2,2] = BatchNormGradApply(c, x, scale, a.stats, a.bias, a.scale) {epsilon=1e-05}
      loss: f32[] = SumSquares(b, a.grad, b.grad)
    output loss
  )"));
  two_ranks(true)(graph);
  EXPECT_LINES(
      dump(graph),
      {"a.stats: f32[10] = BatchStats(x)", testing::next_line("b.stats: f32[10] = BatchStats(dy)"),
       testing::next_line("a.stats.siblings: f32[20] = Concat(a.stats, b.stats) {axis=0}"),
       testing::next_line("a.stats.all: f32[2,20] = AllGather(a.stats.siblings) {ranks=2}"),
       testing::next_line("a.stats.ranks: f32[2,10] = Slice(a.stats.all)"),
       testing::next_line("a.stats.merged: f32[10] = MergeStats(a.stats.ranks)"), "r: f32[N,4,2,2] = Relu(a)",
       "b.stats.ranks: f32[2,10] = Slice(a.stats.all)", "c.stats.all: f32[2,10] = AllGather(c.stats)",
       "a.bias: f32[4], a.scale: f32[4] = BatchNormGradSums(c, x, a.stats.merged)",
       testing::next_line(
           "b.bias.sum: f32[4], b.scale.sum: f32[4], a.bias.sum: f32[4], a.scale.sum: f32[4] = "
           "AllReduce(b.bias, b.scale, a.bias, a.scale)"),
       "b.grad: f32[N,4,2,2] = BatchNormGradApply(c, dy, scale, b.stats.merged, b.bias.sum, b.scale.sum)"});
}

TEST(Distribute, SumsThatAreOnlyPartOfAGradientStayInTheBuckets) {
  std::string text = testing::unindent(kBatchNorm);
  const std::string output = "output scale.grad\n";
  text.replace(text.find(output), output.size(), "output scale.grad = more\n");
  const std::string loss = "  loss:";
  text.insert(text.find(loss), "  more: f32[4] = Add(scale.grad, scale)\n");
  Graph graph = parse(text);
  two_ranks(true)(graph);
  EXPECT_LINES(dump(graph), {"more: f32[4] = Add(scale.grad, scale)",
                             "scale.sum: f32[4], loss.total: f32[] = AllReduce(more, loss)",
                             "output scale.grad = scale.sum", "output bias.grad = bias.grad.sum"});
}

TEST(Distribute, LocalBatchNormKeepsItsOwnStatistics) {
  Graph graph = parse(testing::unindent(kBatchNorm));
  two_ranks(false)(graph);
  EXPECT_LINES(dump(graph), {testing::absent("AllGather"),
                             "scale.sum: f32[4], bias.sum: f32[4], loss.total: f32[] = AllReduce("});
}

TEST(Distribute, MicroProgramsReduceStatisticsOnly) {
  Graph graph = parse(testing::unindent(kBatchNorm));
  distribute(graph, {.ranks = 2, .sync_batch_norm = true, .reduce_gradients = false});
  EXPECT_LINES(dump(graph),
               {"AllGather(", "AllReduce(bias.grad, scale.grad)", testing::absent("AllReduce(")});
}

// Ten Linear(1024, 1024) of PyTorch: reversed registration, first bucket 1 MiB, then 25 MiB, closing at or
// above the cap.
TEST(Buckets, TorchPolicyGivesTorchsSizes) {
  std::vector<std::size_t> bytes;
  for (int i = 0; i < 10; ++i) bytes.insert(bytes.end(), {4096, 4194304});  // bias before weight
  const std::vector<std::size_t> counts = plan_buckets(bytes, "torch", 0);
  ASSERT_EQ(counts.size(), 3U);
  std::vector<std::size_t> sizes;
  std::size_t at = 0;
  for (std::size_t count : counts) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += bytes[at++];
    sizes.push_back(sum);
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{4198400, 29388800, 8396800}));
}

TEST(Buckets, PlannedPolicyEndsWithASmallBucket) {
  const std::size_t mib = 1 << 20;
  EXPECT_EQ(plan_buckets({3 * mib, 3 * mib, 3 * mib, 3 * mib, 1000}, "planned", 0),
            (std::vector<std::size_t>{2, 2, 1}));
  EXPECT_EQ(plan_buckets({100, 200, 300}, "planned", 0), (std::vector<std::size_t>{3}));
  EXPECT_EQ(plan_buckets({}, "planned", 0), (std::vector<std::size_t>{}));
  EXPECT_THROW(plan_buckets({}, "tourch", 0), Error);
}

}  // namespace
}  // namespace onnxddp

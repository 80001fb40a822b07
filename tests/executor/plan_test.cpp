#include "executor/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "executor/plan/draft.h"
#include "tests/executor/plan_testing.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

using ::testing::HasSubstr;
using testing::PaperDevice;
using testing::plan_of;
using testing::unindent;

#define EXPECT_PLAN(plan, text) EXPECT_EQ(dump(plan), unindent(text))

/// The message of the InternalError that `plan` deserves; empty if it is right.
std::string fault(const Plan& plan) {
  try {
    plan_check(plan);
  } catch (const InternalError& error) {
    return error.what();
  }
  return "";
}

const Slot& slot(const Plan& plan, const std::string& name) {
  for (const Slot& s : plan.slots)
    if (s.name == name) return s;
  throw InternalError("no slot " + name);
}

Step& step(Plan& plan, const std::string& op) {
  for (Step& s : plan.steps)
    if (s.op == op) return s;
  throw InternalError("no step " + op);
}

bool share(const Plan& plan, const std::string& a, const std::string& b) {
  const Slot &x = slot(plan, a), &y = slot(plan, b);
  return x.region == y.region && x.offset == y.offset;
}

constexpr std::string_view kMlp = R"(
graph mlp v1
input  x: f32[N,8]
input  dy: f32[N,4]
state  hyper: f64[5]
param  w1: f32[16,8]
param  w2: f32[4,16]
  h: f32[N,16] = Gemm(x, w1) {transB=1}
  a: f32[N,16] = Relu(h)
  y: f32[N,4] = Gemm(a, w2) {transB=1}
  w2.grad: f32[4,16] = Gemm(dy, a) {transA=1}
  w2.sum: f32[4,16] = AllReduce(w2.grad)
  a.grad: f32[N,16] = Gemm(dy, w2)
  a.bw: f32[N,16] = Step(a)
  h.grad: f32[N,16] = Mul(a.grad, a.bw)
  w1.grad: f32[16,8] = Gemm(h.grad, x) {transA=1}
  loss.local: f32[] = ReduceSum(y) {axes=[0,1], keepdims=0}
  w1.sum: f32[16,8], loss: f32[] = AllReduce(w1.grad, loss.local)
  w2.next: f32[4,16] = SgdUpdate(w2, w2.sum, hyper)
  w1.next: f32[16,8] = SgdUpdate(w1, w1.sum, hyper)
update w2 <- w2.next
update w1 <- w1.next
output loss
)";

TEST(Plan, OverlapsBucketsAndUpdatesInPlace) {
  EXPECT_PLAN(plan_of(kMlp, {{"N", 2}}), R"(
    plan mlp N=2 device=paper state=832B grads=832B arena=320B steps=13 collectives=2
       #  lane     op         reads               writes      at     waits
       0  compute  Gemm       x w1                h           a+0
       1  compute  Relu       h                   a           a+0
       2  compute  Gemm       a w2                y           a+256
       3  compute  Gemm       dy a                w2.grad     g+0
       4  comm     AllReduce  w2.grad             in place    g+0    3
       5  compute  Gemm       dy w2               a.grad      a+128
       6  compute  Step       a                   a.bw        a+0
       7  compute  Mul        a.grad a.bw         h.grad      a+128
       8  compute  Gemm       h.grad x            w1.grad     g+256
       9  compute  ReduceSum  y                   loss.local  g+768
      10  comm     AllReduce  w1.grad loss.local  in place    g+256  9
      11  compute  SgdUpdate  w2 w2.sum hyper     w2          state  4
      12  compute  SgdUpdate  w1 w1.sum hyper     w1          state  10
  )");
}

constexpr std::string_view kConv = R"(
graph cnn v1
input  x: f32[2,3,8,8]
param  w: f32[4,3,3,3]
param  v: f32[4,4,3,3]
param  s: f32[4,1,1]
  c1: f32[2,4,8,8] = Conv(x, w) {dilations=[1,1], group=1, pads=[1,1,1,1], strides=[1,1]}
  a1: f32[2,4,8,8] = Relu(c1)
  b1: f32[2,4,8,8] = Mul(a1, s)
  c2: f32[2,4,8,8] = Conv(b1, v) {dilations=[1,1], group=1, pads=[1,1,1,1], strides=[1,1]}
  p: f32[2,4,4,4] = MaxPool(c2) {kernel_shape=[2,2], strides=[2,2]}
  m: f32[2,4,1,1] = ReduceMean(p) {axes=[2,3]}
  f: f32[2,4] = Reshape(m) {shape=[2,4]}
  dw: f32[4,3,3,3] = ConvWeightGrad(c2, x) {dilations=[1,1], group=1, pads=[1,1,1,1], shape=[4,3,3,3], strides=[1,1]}
update w <- dw
output f
output p
)";

TEST(Plan, KeepsConvolutionChainsInOneLayout) {
  EXPECT_PLAN(plan_of(kConv), R"(
    plan cnn device=paper state=1.1KiB grads=0B arena=5.5KiB steps=9 collectives=0
      #  lane     op              reads      writes   at      waits
      0  compute  Reorder         x          x@nhwc   a+4096
      1  compute  Conv            x@nhwc w   c1       a+0
      2  compute  Relu            c1         a1       a+0
      3  compute  Mul             a1 s       b1       a+0
      4  compute  Conv            b1 v       c2       a+2048
      5  compute  MaxPool         c2         p        a+0
      6  compute  Reorder         p          p@dense  a+512
      7  compute  ReduceMean      p@dense    m        a+0
      8  compute  ConvWeightGrad  c2 x@nhwc  w        state
      view f of m
  )");
}

TEST(Plan, NeedsNoReorderForOneChannel) {
  const Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[2,1,8,8]
    param  w: f32[4,1,8,8]
      c: f32[2,4,1,1] = Conv(x, w) {dilations=[1,1], group=1, pads=[0,0,0,0], strides=[1,1]}
      y: f32[2,4] = Reshape(c) {shape=[2,4]}
    output y
  )");
  ASSERT_EQ(plan.steps.size(), 1U);
  EXPECT_EQ(plan.steps[0].op, "Conv");
}

TEST(Plan, FollowersTakeTheLayoutOfAnyOperand) {
  const Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[2,3,4,4]
    input  r: f32[2,3,4,4]
    param  w: f32[3,3,1,1]
      c: f32[2,3,4,4] = Conv(x, w) {dilations=[1,1], group=1, pads=[0,0,0,0], strides=[1,1]}
      s: f32[2,3,4,4] = Add(r, c)
      y: f32[2,3,4,4] = Conv(s, w) {dilations=[1,1], group=1, pads=[0,0,0,0], strides=[1,1]}
      z: f32[2,3,4,4] = Mul(s, y)
      q: f32[2,3,4,4] = Relu(r)
    output z
    output q
  )");
  EXPECT_EQ(slot(plan, "r@nhwc").type.layout, Layout::nhwc);
  EXPECT_EQ(slot(plan, "s").type.layout, Layout::nhwc);
  EXPECT_EQ(slot(plan, "z").type.layout, Layout::nhwc);
  EXPECT_EQ(plan.slots[static_cast<std::size_t>(plan.outputs.at("z"))].name, "z@dense");
  int reorders = 0;
  for (const Step& s : plan.steps) reorders += s.op == "Reorder";
  EXPECT_EQ(reorders, 4);  // x, r, z and q: s is used twice as it is
}

TEST(Plan, ReusesDyingOperands) {
  const Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[2,3]
      a: f32[2,3] = Exp(x)
      b: f32[2,3] = Neg(a)
      c: f32[2,3] = Add(a, b)
      d: f32[2,3] = Mul(c, c)
      e: f32[2,3] = Tanh(d)
    output e
    output d
  )");
  EXPECT_FALSE(share(plan, "a", "x"));  // feeds are not ours
  EXPECT_FALSE(share(plan, "b", "a"));  // a is read again
  EXPECT_TRUE(share(plan, "c", "a"));
  EXPECT_FALSE(share(plan, "d", "c"));  // c is two operands
  EXPECT_FALSE(share(plan, "e", "d"));  // d is an output
}

TEST(Plan, ViewsCostNothingAndKeepTheirBytes) {
  const Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[2,3]
      a: f32[2,3] = Exp(x)
      v: f32[6] = Reshape(a) {shape=[6]}
      b: f32[2,3] = Neg(a)
      w: f32[3,2] = Reshape(v) {shape=[3,2]}
      c: f32[3,2] = Tanh(w)
    output b
    output c
  )");
  EXPECT_PLAN(plan, R"(
    plan g device=paper state=0B grads=0B arena=128B steps=3 collectives=0
      #  lane     op    reads  writes  at    waits
      0  compute  Exp   x      a       a+0
      1  compute  Neg   a      b       a+64
      2  compute  Tanh  w      c       a+0
      view v of a
      view w of a
  )");
}

TEST(Plan, UpdatesInPlaceOnlyWhenNobodyNeedsTheOldValue) {
  const std::string head = R"(
    graph g v1
    input  x: f32[4]
    param  p: f32[4]
  )";
  const Plan last = plan_of(head + "  n: f32[4] = Add(p, x)\nupdate p <- n\n");
  EXPECT_TRUE(share(last, "n", "p"));
  EXPECT_EQ(last.steps.size(), 1U);
  const Plan read =
      plan_of(head + "  n: f32[4] = Add(p, x)\n  y: f32[4] = Neg(p)\nupdate p <- n\noutput y\n");
  EXPECT_FALSE(share(read, "n", "p"));
  EXPECT_EQ(read.steps.back().op, "Copy");
  const Plan fresh = plan_of(head + "  y: f32[4] = Neg(p)\n  n: f32[4] = Exp(x)\nupdate p <- n\noutput y\n");
  EXPECT_TRUE(share(fresh, "n", "p"));
  const Plan both =
      plan_of(head + "  y: f32[4] = Neg(p)\n  n: f32[4] = Add(p, p)\nupdate p <- n\noutput y\n");
  EXPECT_FALSE(share(both, "n", "p"));
  const Plan view = plan_of(
      head + "  v: f32[2,2] = Reshape(p) {shape=[2,2]}\n  n: f32[4] = Exp(x)\nupdate p <- n\noutput v\n");
  EXPECT_EQ(view.slots[static_cast<std::size_t>(view.outputs.at("v"))].name, "v@out");
  EXPECT_FALSE(share(view, "n", "p"));
}

TEST(Plan, UpdatesHappenAllAtOnce) {
  EXPECT_PLAN(plan_of(R"(
    graph swap v1
    input  x: f32[4]
    state  a: f32[4]
    state  b: f32[4]
    state  c: f32[4]
    update a <- b
    update b <- a
    update c <- x
    output a
  )"),
              R"(
    plan swap device=paper state=192B grads=0B arena=128B steps=5 collectives=0
      #  lane     op    reads  writes  at     waits
      0  compute  Copy  a      a@out   a+0
      1  compute  Copy  b      b@old   a+64
      2  compute  Copy  a      b       state
      3  compute  Copy  b@old  a       state
      4  compute  Copy  x      c       state
  )");
}

TEST(Plan, CopiesIntoABucketWhatMayNotLiveThere) {
  const Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[4]
      free: f32[4] = Exp(x)
      early: f32[4] = Neg(x)
      e: f32[4] = Tanh(early)
      late: f32[4] = Sqrt(x)
      out: f32[4] = Abs(x)
      view: f32[2,2] = Reshape(free) {shape=[2,2]}
      twice: f32[4] = Sign(x)
      r0: f32[4], r1: f32[4], r2: f32[2,2], r3: f32[4], r4: f32[4], r5: f32[4], r6: f32[4] = AllReduce(early, late, view, out, x, twice, twice)
      l: f32[4] = Add(late, r1)
    output e
    output l
    output out
    output r0
    output r2
    output r6
  )");
  EXPECT_EQ(slot(plan, "early").region, Region::grads);
  for (const std::string name : {"late", "view", "out", "x", "twice"})
    EXPECT_EQ(slot(plan, name + "@bucket").region, Region::grads) << name;
  for (const std::string name : {"late", "out", "twice"})
    EXPECT_EQ(slot(plan, name).region, Region::arena) << name;
  EXPECT_EQ(plan.grads_bytes, 7 * 64U);
  EXPECT_TRUE(share(plan, "early", "r0"));
  for (std::size_t i = 0; i < 7; ++i)
    EXPECT_EQ(
        plan.slots[static_cast<std::size_t>(step(const_cast<Plan&>(plan), "AllReduce").reads[i])].offset,
        i * 64);
}

TEST(Plan, KeepsWhatAnotherLaneUsesUntilTheWait) {
  Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[64]
      a: f32[64] = Exp(x)
      g: f32[2,64] = AllGather(a) {ranks=2}
      b: f32[64] = Neg(x)
      c: f32[64] = Sqrt(b)
      d: f32[64] = Tanh(c)
      s: f32[64] = ReduceSum(g) {axes=[0], keepdims=0}
      y: f32[64] = Add(d, s)
      z: f32[64] = Exp(y)
    output z
  )");
  EXPECT_FALSE(share(plan, "b", "a"));
  EXPECT_EQ(step(plan, "ReduceSum").waits, std::vector<int>{1});
  EXPECT_EQ(plan.collectives, 1);
  step(plan, "ReduceSum").waits.clear();
  EXPECT_THAT(fault(plan), HasSubstr("reads 'g' without waiting for step 1"));
}

TEST(Plan, StoresEqualConstantsOnceAndBoundDimensionsAsData) {
  const Plan plan = plan_of(R"(
    graph g v1
    input  x: f32[N,2]
    const  a: f32[2] = [1, 2]
    const  b: f32[2] = [1, 2]
    const  n: f32[] = [20*N]
      y: f32[N,2] = Add(x, a)
      z: f32[N,2] = Mul(y, b)
      q: f32[N,2] = Div(z, n)
    output q
  )",
                            {{"N", 3}});
  EXPECT_TRUE(share(plan, "a", "b"));
  ASSERT_EQ(plan.constants.size(), 2U);
  EXPECT_EQ(plan.constants[1].second, HostTensor::scalar(60.0F));
}

TEST(Plan, GivesScratchItsOwnBytes) {
  PaperDevice device;
  device.scratch["Exp"] = 1000;
  const Plan plan = plan_of(
      "graph g v1\ninput x: f32[4]\n  y: f32[4] = Exp(x)\n  z: f32[4] = Exp(y)\noutput z\n", {}, device);
  EXPECT_EQ(plan.arena_bytes, 1024U + 64U);
  EXPECT_EQ(plan.steps[0].scratch_offset, plan.steps[1].scratch_offset);
}

TEST(Plan, NamesTheOpWithoutAKernel) {
  try {
    plan_of("graph g v1\ninput x: f64[4]\n  y: f64[4] = Erf(x)\noutput y\n");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.report(),
              "there is no paper kernel for Erf of f64\n   at    x: f64[4]\n   in    Erf 'y'\n"
              "   hint  `onnx-ddp ops` lists what each device has");
  }
}

TEST(Plan, SharesTheStateLayoutOfOtherPrograms) {
  StateLayout state;
  make_plan(parse("graph a v1\nparam p: f32[4]\nstate s: f32[40]\noutput p\n"), PaperDevice(), state);
  const Plan plan = make_plan(parse("graph b v1\nstate t: f32[4]\nstate s: f32[40]\noutput s\noutput t\n"),
                              PaperDevice(), state);
  EXPECT_EQ(slot(plan, "s").offset, 64U);
  EXPECT_EQ(slot(plan, "t").offset, 64U + 192U);
  EXPECT_EQ(state.bytes, 320U);
  EXPECT_THROW(make_plan(parse("graph c v1\nstate s: f32[41]\noutput s\n"), PaperDevice(), state), Error);
}

// Each fault is planted into the plan of the MLP.
struct Fault {
  std::string message;
  std::function<void(Plan&)> plant;
};

TEST(PlanCheck, FindsPlantedFaults) {
  const auto find = [](Plan& plan, const std::string& name) -> Slot& {
    return const_cast<Slot&>(slot(plan, name));
  };
  const Fault faults[] = {
      {"without waiting for step", [](Plan& p) { step(p, "AllReduce").waits.clear(); }},
      {"which is not before it", [](Plan& p) { step(p, "Gemm").waits = {5}; }},
      {"reads 'w2.grad' where 'w2.sum' is",
       [](Plan& p) { p.steps.back().reads[1] = step(p, "AllReduce").reads[0]; }},
      {"before it is written", [](Plan& p) { std::swap(p.steps[0], p.steps[1]); }},
      {"reads 'a' where 'a.grad' is", [&](Plan& p) { find(p, "a.grad").offset = find(p, "a").offset; }},
      {"leaves arena", [](Plan& p) { p.arena_bytes = 64; }},
      {"is not aligned", [&](Plan& p) { find(p, "h").offset += 4; }},
      {"is nowhere", [&](Plan& p) { find(p, "h").region = Region::none; }},
      {"has 4 bytes", [&](Plan& p) { find(p, "h").bytes = 4; }},
      {"where 'w2.next' is", [](Plan& p) { p.steps.push_back(p.steps[5]); }},
      {"collectives, the plan says 7", [](Plan& p) { p.collectives = 7; }},
      {"writes 'x' in feeds", [](Plan& p) { p.steps[0].writes[0] = p.steps[0].reads[0]; }},
      {"touches bytes outside of arena",
       [](Plan& p) { p.steps[0].scratch_offset = p.arena_bytes, p.steps[0].scratch_bytes = 1; }},
      {"which step 3 reads",
       [&](Plan& p) {
         p.steps[3].scratch_bytes = 64;
         p.steps[3].scratch_offset = find(p, "a").offset;
       }},
      {"over a part of its operand", [&](Plan& p) { find(p, "a").offset = find(p, "h").offset + 64; }},
      {"end: reads 'loss' where",
       [&](Plan& p) {
         p.outputs["loss"] = p.steps[0].writes[0];
         p.slots[static_cast<std::size_t>(p.steps[0].writes[0])].name = "loss";
       }},
  };
  for (const Fault& f : faults) {
    Plan plan = plan_of(kMlp, {{"N", 2}});
    f.plant(plan);
    EXPECT_THAT(fault(plan), HasSubstr(f.message));
  }
}

TEST(PlanCheck, FindsARaceBetweenLanes) {
  Plan plan = plan_of(kMlp, {{"N", 2}});
  // The first update no longer waits for the reduction, but neither does it read its result.
  Step& update = step(plan, "SgdUpdate");
  update.reads[1] = update.reads[0];
  update.writes[0] = step(plan, "AllReduce").writes[0];
  update.waits.clear();
  EXPECT_THAT(fault(plan), HasSubstr("without waiting for step"));
}

TEST(PlanCheck, FindsViewsThatAreElsewhere) {
  Plan plan = plan_of(
      "graph g v1\ninput x: f32[4]\n  e: f32[4] = Exp(x)\n  v: f32[2,2] = Reshape(e) {shape=[2,2]}\noutput "
      "v\n");
  EXPECT_EQ(fault(plan), "");
  Plan moved = plan;
  const_cast<Slot&>(slot(moved, "v")).region = Region::feeds;
  EXPECT_THAT(fault(moved), HasSubstr("is no view of 'e'"));
  plan.steps[0].writes[0] = plan.outputs.at("v");
  EXPECT_THAT(fault(plan), HasSubstr("writes the view 'v'"));
}

TEST(PlanCheck, RanksIssueTheSameCollectives) {
  const Plan a = plan_of(kMlp, {{"N", 2}}), b = plan_of(kMlp, {{"N", 3}});
  plan_check_ranks({&a, &b});
  Plan c = b;
  std::swap(step(c, "AllReduce").reads[0], c.steps.front().reads[0]);
  EXPECT_THROW(plan_check_ranks({&a, &b, &c}), InternalError);
  Plan d = b;
  d.steps.resize(5);
  EXPECT_THROW(plan_check_ranks({&a, &d}), InternalError);
}

void expect_disjoint(const std::vector<Block>& blocks) {
  const auto [offsets, total] = pack(blocks);
  std::size_t peak = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(offsets[i] % 64, 0U);
    EXPECT_LE(offsets[i] + blocks[i].bytes, total);
    std::size_t alive = 0;
    for (std::size_t j = 0; j < blocks.size(); ++j) {
      if (blocks[j].begin <= blocks[i].begin && blocks[i].begin <= blocks[j].end)
        alive += padded(blocks[j].bytes);
      if (j <= i || blocks[j].end < blocks[i].begin || blocks[i].end < blocks[j].begin) continue;
      EXPECT_TRUE(offsets[i] + blocks[i].bytes <= offsets[j] || offsets[j] + blocks[j].bytes <= offsets[i]);
    }
    peak = std::max(peak, alive);
  }
  EXPECT_GE(total, peak);
  EXPECT_LE(total, peak * 3 / 2);
}

TEST(Pack, NeverOverlapsAndStaysNearThePeak) {
  std::mt19937 random(1);
  for (const int count : {1, 10, 100, 1000, 3500}) {  // the last one in order of time
    std::vector<Block> blocks;
    for (int i = 0; i < count; ++i) {
      const int begin = static_cast<int>(random() % static_cast<unsigned>(count));
      blocks.push_back({random() % 2000, begin, begin + static_cast<int>(random() % 20)});
    }
    expect_disjoint(blocks);
  }
}

TEST(Pack, FillsGapsBiggestFirst) {
  // Two long-lived small blocks, then a large one: by time it would lie on top of both.
  const auto [offsets, total] = pack({{64, 0, 1}, {64, 0, 9}, {1024, 2, 9}, {128, 0, 1}});
  EXPECT_EQ(total, 1024U + 64U);
  (void)offsets;
}

}  // namespace
}  // namespace onnxddp

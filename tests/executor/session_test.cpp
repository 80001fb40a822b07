#include "executor/plan/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "graph/builder.h"
#include "graph/pass.h"
#include "graph/passes/passes.h"
#include "graph/text.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

using ::testing::HasSubstr;

template <class F>
std::string message_of(F body) {
  try {
    body();
  } catch (const Error& error) {
    return error.report();
  }
  return "";
}

/// A session of one rank on the CPU.
struct Alone {
  std::unique_ptr<Device> device = make_cpu_device(1);
  std::unique_ptr<Communicator> communicator = make_communicator({});
  Session session{*device, *communicator};
};

constexpr std::string_view kMean = R"(
graph mean v1
input  x: f64[N,2]
state  total: f64[2]
state  scale: f64[]
  s: f64[2] = ReduceSum(x) {axes=[0], keepdims=0}
  t: f64[2] = Mul(s, scale)
  total.next: f64[2] = Add(total, t)
update total <- total.next
output s
output total = total.next
)";

Feeds rows(std::int64_t n) { return {{"x", HostTensor::full(DType::f64, {n, 2}, 1)}}; }

TEST(Session, RunsStepsOverState) {
  Alone a;
  a.session.add_program("mean", parse(kMean));
  a.session.set_scalar("scale", 10);
  a.session.set_scalar("nobody", 10);
  EXPECT_EQ(a.session.get_state("total"), HostTensor::of<double>({2}, {0, 0}));
  Feeds out = a.session.run("mean", rows(3));
  EXPECT_EQ(out.size(), 2U);
  EXPECT_EQ(out.at("s"), HostTensor::of<double>({2}, {3, 3}));
  EXPECT_EQ(out.at("total"), HostTensor::of<double>({2}, {30, 30}));
  out = a.session.run("mean", rows(5), {"s"});
  EXPECT_EQ(out.size(), 1U);
  EXPECT_EQ(out.at("s"), HostTensor::of<double>({2}, {5, 5}));
  EXPECT_EQ(a.session.get_state("total"), HostTensor::of<double>({2}, {80, 80}));
  a.session.set_state("total", HostTensor::of<double>({2}, {1, 2}));
  EXPECT_EQ(a.session.run("mean", rows(0)).at("total"), HostTensor::of<double>({2}, {1, 2}));
}

TEST(Session, SharesStateBetweenPrograms) {
  Alone a;
  a.session.add_program("mean", parse(kMean));
  a.session.set_state("total", HostTensor::of<double>({2}, {1, 2}));
  a.session.add_program("look", parse(R"(
    graph look v1
    state more: f64[300]
    state total: f64[2]
      y: f64[2] = Neg(total)
    output y
  )"));
  EXPECT_EQ(a.session.run("look", {}).at("y"), HostTensor::of<double>({2}, {-1, -2}));
  a.session.set_scalar("scale", 1);
  a.session.run("mean", rows(1));
  EXPECT_EQ(a.session.run("look", {}).at("y"), HostTensor::of<double>({2}, {-2, -3}));
  EXPECT_EQ(a.session.state_names(), (std::vector<std::string>{"more", "scale", "total"}));
  EXPECT_TRUE(a.session.has_state("more"));
  EXPECT_FALSE(a.session.has_state("x"));
  EXPECT_EQ(a.session.program("look").name, "look");
  EXPECT_THAT(message_of([&] {
                a.session.add_program("bad", parse("graph bad v1\nstate total: f32[4]\noutput total\n"));
              }),
              HasSubstr("'total' is f32[4] in 'bad' and f64[2] in another program"));
}

TEST(Session, RefusesWrongTypes) {
  Alone a;
  a.session.add_program("mean", parse(kMean));
  const auto set = [&](const char* name, HostTensor value) {
    return message_of([&] { a.session.set_state(name, value); });
  };
  EXPECT_EQ(set("total", HostTensor(DType::f32, {2})), "'total' is f64[2], but f32[2] is given");
  EXPECT_EQ(set("total", HostTensor(DType::f64, {3})), "'total' is f64[2], but f64[3] is given");
  EXPECT_THAT(set("x", HostTensor(DType::f64, {3})), HasSubstr("no program has a tensor 'x'"));
  EXPECT_THAT(message_of([&] { a.session.get_state("x"); }), HasSubstr("'x'"));
  EXPECT_THAT(message_of([&] { a.session.set_scalar("total", 1); }),
              HasSubstr("'total' is f64[2], but f64[] is given"));
  EXPECT_THAT(message_of([&] { a.session.run("mean", {}); }), HasSubstr("input 'x' of 'mean' is not fed"));
  EXPECT_THAT(message_of([&] { a.session.run("mean", rows(2), {"z"}); }),
              HasSubstr("'mean' has no output 'z'"));
}

TEST(Session, BindsSymbolsToTheShapesFed) {
  Alone a;
  a.session.add_program("pair", parse(R"(
    graph pair v1
    input  x: f32[N,2*M+1]
    input  y: f32[N,4]
      s: f32[2*M+1] = ReduceSum(x) {axes=[0], keepdims=0}
      t: f32[4] = ReduceSum(y) {axes=[0], keepdims=0}
    output s
    output t
  )"));
  const auto run = [&](Ints x, Ints y) {
    return message_of([&] {
      a.session.run("pair", {{"x", HostTensor(DType::f32, x)}, {"y", HostTensor(DType::f32, y)}});
    });
  };
  EXPECT_EQ(run({3, 7}, {3, 4}), "");
  EXPECT_EQ(run({1, 1}, {1, 4}), "");
  EXPECT_EQ(run({3, 7}, {2, 4}), "input 'y' of 'pair' is f32[N,4] with M=3, N=3, but f32[2,4] is fed");
  EXPECT_EQ(run({3, 6}, {3, 4}), "input 'x' of 'pair' is f32[N,2*M+1] with N=3, but f32[3,6] is fed");
  EXPECT_EQ(run({3, 7}, {3, 5}), "input 'y' of 'pair' is f32[N,4] with M=3, N=3, but f32[3,5] is fed");
  EXPECT_THAT(run({3, 7, 1}, {3, 4}), HasSubstr("but f32[3,7,1] is fed"));
  EXPECT_THAT(
      message_of([&] {
        a.session.run("pair", {{"x", HostTensor(DType::f64, {3, 7})}, {"y", HostTensor(DType::f32, {3, 4})}});
      }),
      HasSubstr("but f64[3,7] is fed"));
  EXPECT_THAT(message_of([&] {
                a.session.run("pair", {{"x", HostTensor(DType::f32, {3, 7})},
                                       {"y", HostTensor(DType::f32, {3, 4})},
                                       {"z", HostTensor()}});
              }),
              HasSubstr("'pair' has no input 'z'"));
}

TEST(Session, KeepsEightPlans) {
  Alone a;
  a.session.add_program("mean", parse(kMean));
  std::vector<const Plan*> plans;
  for (std::int64_t n = 1; n <= 8; ++n) plans.push_back(&a.session.plan("mean", {{"N", n}}));
  EXPECT_EQ(&a.session.plan("mean", {{"N", 1}}), plans[0]);
  EXPECT_EQ(plans[0]->dims.at("N"), 1);
  a.session.run("mean", rows(1));
  a.session.run("mean", rows(9));  // the plan for 2 goes
  for (const std::int64_t n : {1, 3, 4, 5, 6, 7, 8})
    EXPECT_EQ(&a.session.plan("mean", {{"N", n}}), plans[static_cast<std::size_t>(n) - 1]) << n;
}

TEST(Session, SharesTheArenaOfItsPlans) {
  Alone a;
  a.session.add_program("wide", parse(R"(
    graph wide v1
    input  x: f32[N,256]
    state  s: f32[16]
    const  c: f32[4] = [1, 2, 3, 4]
      a: f32[N,256] = Exp(x)
      b: f32[N,256] = Add(a, x)
      y: f32[] = ReduceSum(b) {axes=[0,1], keepdims=0}
    output y
    output c
    output s
  )"));
  EXPECT_EQ(a.session.memory_bytes(), 64U);  // the state
  const std::size_t arena = a.session.plan("wide", {{"N", 64}}).arena_bytes;
  const std::size_t after = 64 + 65536 + arena + 64;  // state, feeds, arena, constants
  EXPECT_EQ(a.session.memory_bytes(), after);
  a.session.plan("wide", {{"N", 7}});
  EXPECT_EQ(a.session.memory_bytes(), after + 64);  // constants only
  const Feeds x = {{"x", HostTensor::full(DType::f32, {7, 256}, 0)}};
  const HostTensor before = a.session.run("wide", x).at("y");
  a.session.plan("wide", {{"N", 1000}});  // memory moves
  EXPECT_EQ(a.session.run("wide", x).at("y"), before);
  EXPECT_EQ(before, HostTensor::scalar(7 * 256.0F));
}

TEST(Session, AddsThePlaceToErrorsOfKernels) {
  Alone a;
  a.session.add_program("g", parse(R"(
    graph g v1
    input  x: f32[4]
    input  i: i64[1]
      y: f32[1] = Gather(x, i) {axis=0}
    output y
  )"));
  const auto run = [&](std::int64_t i) {
    return message_of([&] {
      a.session.run("g", {{"x", HostTensor(DType::f32, {4})}, {"i", HostTensor::of<std::int64_t>({1}, {i})}});
    });
  };
  EXPECT_THAT(run(7), HasSubstr("in    Gather 'y'"));
  EXPECT_EQ(run(3), "");
}

// ---- several ranks

std::string sum_text(std::int64_t n) {
  return cat("graph sum v1\ninput x: f64[", n, "]\ninput i: i64[1]\nstate p: f64[", n, "]\n", "  a: f64[", n,
             "] = Neg(x)\n  r: f64[", n, "] = AllReduce(a)\n  b: f64[", n, "] = Mul(x, x)\n",
             "  one: f64[1] = Gather(b, i) {axis=0}\n  g: f64[2,1] = AllGather(one) {ranks=2}\n", "  c: f64[",
             n, "] = Add(r, b)\n  p.next: f64[", n,
             "] = Add(p, c)\nupdate p <- p.next\noutput g\noutput r\n");
}

void run_two(std::int64_t n, const std::function<void(Session&, Communicator&)>& body) {
  run_ranks(2, [&](Communicator& communicator) {
    const auto device = make_cpu_device(1);
    Session session(*device, communicator);
    session.add_program("sum", parse(sum_text(n)));
    plan_check(session.plan("sum", {}));
    body(session, communicator);
  });
}

Feeds sum_feeds(std::int64_t n, int rank, std::int64_t index = 0) {
  return {{"x", HostTensor::full(DType::f64, {n}, rank + 1)},
          {"i", HostTensor::of<std::int64_t>({1}, {index})}};
}

class SessionRanks : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(SessionRanks, ReduceAndGather) {
  const std::int64_t n = GetParam();
  run_two(n, [&](Session& session, Communicator& communicator) {
    for (int step = 1; step <= 20; ++step) {
      const int rank = communicator.rank();
      const Feeds out = session.run("sum", sum_feeds(n, rank));
      ASSERT_EQ(out.at("g"), HostTensor::of<double>({2, 1}, {1, 4}));
      ASSERT_EQ(out.at("r"), HostTensor::full(DType::f64, {n}, -3));
      ASSERT_EQ(session.get_state("p"),
                HostTensor::full(DType::f64, {n}, step * (-3.0 + (rank + 1) * (rank + 1))));
    }
  });
}

TEST_P(SessionRanks, ErrorsOfEitherThreadReachTheCaller) {
  const std::int64_t n = GetParam();
  std::atomic<int> own{0}, peer{0};
  const std::string error = message_of([&] {
    run_two(n, [&](Session& session, Communicator& communicator) {
      const int rank = communicator.rank();
      session.run("sum", sum_feeds(n, rank));
      try {
        session.run("sum", sum_feeds(n, rank, rank == 1 ? n : 0));
      } catch (const PeerError& e) {
        EXPECT_THAT(e.place(), HasSubstr("All"));  // AllReduce or AllGather
        ++peer;
        throw;
      } catch (const Error& e) {
        EXPECT_THAT(e.place(), HasSubstr("Gather 'one'"));
        ++own;
        throw;
      }
    });
  });
  EXPECT_EQ(own, 1);
  EXPECT_EQ(peer, 1);
}

// On the compute thread, and large enough for a thread of their own.
INSTANTIATE_TEST_SUITE_P(Sizes, SessionRanks, ::testing::Values(3, 20000));

// ---- any graph: the plan computes what its nodes compute

/// The CPU with some elementwise kernels that insist on N,H,W,C, so that reorders happen in f64.
class MixedDevice : public Device {
 public:
  MixedDevice() : cpu_(make_cpu_device(1)), table_(cpu_->kernels()) {
    for (const char* op : {"Tanh", "Abs"}) {
      const Kernel* old = table_.find(op, DType::f64);
      Kernel kernel = *old;
      kernel.rule = LayoutRule::choose;
      kernel.layouts = [](const PlanContext& c) {
        const Layout layout = c.inputs[0].shape.size() == 4 ? Layout::nhwc : Layout::dense;
        return LayoutChoice{{layout}, {layout}};
      };
      table_.kernels.erase(op);
      table_.kernels.emplace(op, kernel);
    }
  }
  std::string name() const override { return "mixed"; }
  std::string kind() const override { return "cpu"; }
  void* allocate(std::size_t bytes) override { return cpu_->allocate(bytes); }
  void free(void* memory) override { cpu_->free(memory); }
  void upload(void* device, const void* host, std::size_t bytes) override {
    cpu_->upload(device, host, bytes);
  }
  void download(void* host, const void* device, std::size_t bytes) override {
    cpu_->download(host, device, bytes);
  }
  const KernelTable& kernels() const override { return table_; }
  int threads() const override { return 1; }

 private:
  std::unique_ptr<Device> cpu_;
  KernelTable table_;
};

class RandomGraph {
 public:
  RandomGraph(unsigned seed, std::int64_t rows) : random_(seed), shape_{2, 3, rows, 5} {}

  Graph make() {
    Graph graph("random");
    Builder b(graph);
    for (int i = 0; i < 2; ++i) values_.push_back(graph.add_input(cat("x", i), type(pick(2))));
    for (int i = 0; i < 4; ++i)
      values_.push_back(graph.add_param(cat("p", i), type(pick(2)), i < 2 ? Kind::param : Kind::state));
    values_.push_back(graph.add_constant("c", HostTensor::full(DType::f64, shape_, 0.5)));
    const std::vector<ValueId> params = graph.params;
    for (int i = 0; i < 30; ++i) add_node(b, graph);
    for (const ValueId p : params) {
      if (pick(4) == 0) continue;
      const ValueId next = any(graph, static_cast<int>(graph.value(p).type.shape.size()));
      if (graph.value(p).type == graph.value(next).type) graph.updates.push_back({p, next});
    }
    for (int i = 0; i < 4; ++i) graph.outputs.push_back({cat("y", i), values_[pick(values_.size())]});
    verify(graph);
    return graph;
  }

 private:
  std::size_t pick(std::size_t n) { return random_() % n; }
  /// Rank 4, or flat.
  TensorType type(std::size_t flat) const {
    return {DType::f64, flat ? Shape{numel(shape_)} : to_shape(shape_)};
  }

  ValueId any(const Graph& graph, int rank) {
    for (int i = 0; i < 100; ++i) {
      const ValueId id = values_[values_.size() - 1 - pick(std::min<std::size_t>(values_.size(), 12))];
      if (static_cast<int>(graph.value(id).type.shape.size()) == rank) return id;
    }
    return values_.back();
  }

  void add_node(Builder& b, Graph& graph) {
    const ValueId x = any(graph, pick(3) ? 4 : 1);
    const int rank = static_cast<int>(graph.value(x).type.shape.size());
    static const char* const unary[] = {"Tanh", "Abs", "Neg", "Relu", "Sigmoid", "Copy"};
    static const char* const binary[] = {"Add", "Sub", "Mul", "Max"};
    switch (pick(8)) {
      case 0: {
        const Ints shape = rank == 4 ? Ints{numel(shape_)} : shape_;
        return keep(b.emit("Reshape", {x}, {{"shape", shape}}));
      }
      case 1: {
        const ValueId s = b.emit("ReduceMean", {x}, {{"axes", Ints{0}}, {"keepdims", std::int64_t{1}}})[0];
        return keep(b.emit("Add", {x, s}));
      }
      case 2:
      case 3: {
        const ValueId y = any(graph, rank), z = any(graph, rank);
        if (graph.value(y).type != graph.value(x).type || graph.value(z).type != graph.value(x).type) return;
        return keep(b.emit("AllReduce", {x, y, z}));
      }
      case 4:
      case 5: {
        const ValueId y = any(graph, rank);
        if (graph.value(y).type != graph.value(x).type) return;
        return keep(b.emit(binary[pick(4)], {x, y}));
      }
      default: return keep(b.emit(unary[pick(6)], {x}));
    }
  }

  void keep(const std::vector<ValueId>& made) {
    for (const ValueId id : made) values_.push_back(id);
  }

  std::mt19937 random_;
  Ints shape_;
  std::vector<ValueId> values_;
};

/// Node by node, every value in memory of its own; `ranks` equal ranks.
class Interpreter {
 public:
  Interpreter(const Graph& graph, int ranks) : g_(graph), ranks_(ranks) {
    for (const ValueId p : g_.params)
      state_[g_.value(p).name] = HostTensor(DType::f64, static_shape(g_.value(p).type.shape));
  }

  Feeds run(const Feeds& feeds) {
    std::map<ValueId, HostTensor> values;
    for (const ValueId id : g_.inputs) values[id] = feeds.find(g_.value(id).name)->second;
    for (const ValueId id : g_.params) values[id] = state_.find(g_.value(id).name)->second;
    for (const ValueId id : g_.constants) values[id] = *g_.value(id).data;
    for (const NodeId id : g_.order) {
      const Node& node = g_.node(id);
      std::vector<HostTensor> inputs;
      for (const ValueId x : node.inputs) inputs.push_back(values.at(x));
      std::vector<HostTensor> outputs = evaluate_node(g_, id, inputs);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (node.op->name == "AllReduce") scale(outputs[i]);
        values[node.outputs[i]] = outputs[i];
      }
    }
    for (const Update& u : g_.updates) state_[g_.value(u.param).name] = values.at(u.next);
    Feeds out;
    for (const Output& o : g_.outputs) out[o.name] = values.at(o.value);
    return out;
  }
  const Feeds& state() const { return state_; }
  void set_state(const std::string& name, const HostTensor& value) { state_[name] = value; }

 private:
  void scale(HostTensor& t) const {
    for (std::int64_t i = 0; i < t.numel(); ++i) t.set_double(i, t.as_double(i) * ranks_);
  }
  const Graph& g_;
  int ranks_;
  Feeds state_;
};

HostTensor noise(std::mt19937& random, Ints shape) {
  HostTensor t(DType::f64, std::move(shape));
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set_double(i, uniform(random));
  return t;
}

/// Runs three steps both ways, from the same state, and compares every bit.
void compare(const Graph& graph, Communicator& communicator, unsigned seed) {
  MixedDevice device;
  Session session(device, communicator);
  session.add_program("g", graph);
  plan_check(session.plan("g", {}));
  Interpreter reference(graph, communicator.size());
  std::mt19937 random(seed);
  for (const ValueId p : graph.params) {
    const HostTensor value = noise(random, static_shape(graph.value(p).type.shape));
    session.set_state(graph.value(p).name, value);
    reference.set_state(graph.value(p).name, value);
  }
  for (int step = 0; step < 3; ++step) {
    Feeds feeds;
    for (const ValueId x : graph.inputs)
      feeds[graph.value(x).name] = noise(random, static_shape(graph.value(x).type.shape));
    const Feeds want = reference.run(feeds), got = session.run("g", feeds);
    for (const auto& [name, value] : want)
      ASSERT_EQ(got.at(name), value) << name << " at step " << step << "\n"
                                     << dump(graph) << dump(session.plan("g", {}));
    for (const auto& [name, value] : reference.state())
      ASSERT_EQ(session.get_state(name), value) << name << " after step " << step << "\n"
                                                << dump(graph) << dump(session.plan("g", {}));
  }
}

TEST(SessionProperty, PlansEqualTheirNodes) {
  const auto alone = make_communicator({});
  for (unsigned seed = 0; seed < 300; ++seed) {
    compare(RandomGraph(seed, 4).make(), *alone, seed);
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

TEST(SessionProperty, PlansEqualTheirNodesOnTwoRanks) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    // Every second graph is large enough for the comm thread.
    run_ranks(2, [&](Communicator& communicator) {
      compare(RandomGraph(seed, seed % 2 ? 4 : 200).make(), communicator, seed);
    });
    if (HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

// The real thing in small: a convolution net in f32 whose activations are N,H,W,C, three training steps.
TEST(SessionProperty, TrainsAConvolutionNetAsItsNodesDo) {
  Graph graph = parse(R"(
    graph cnn v1
    input  x: f32[6,3,8,8]
    input  t: i64[6]
    param  w1: f32[8,3,3,3]
    param  b1: f32[8]
    param  w2: f32[8,8,3,3]
    param  s: f32[8]
    param  o: f32[8]
    param  w3: f32[5,128]
      c1: f32[6,8,8,8] = Conv(x, w1, b1) {dilations=[1,1], group=1, pads=[1,1,1,1], strides=[1,1]}
      a1: f32[6,8,8,8] = Relu(c1)
      c2: f32[6,8,8,8] = Conv(a1, w2) {dilations=[1,1], group=1, pads=[1,1,1,1], strides=[1,1]}
      st: f32[18] = BatchStats(c2)
      n2: f32[6,8,8,8] = BatchNormApply(c2, s, o, st) {epsilon=1e-05}
      r: f32[6,8,8,8] = Add(n2, a1)
      a2: f32[6,8,8,8] = Relu(r)
      p: f32[6,8,4,4] = MaxPool(a2) {kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
      f: f32[6,128] = Reshape(p) {shape=[6,128]}
      y: f32[6,5] = Gemm(f, w3) {transB=1}
      l: f32[] = CrossEntropyLoss(y, t) {axis=1}
    output loss = l
  )");
  autodiff(graph);
  attach_optimizer(graph, {"sgd", {{"momentum", "0.9"}}});
  verify(graph);
  Alone a;
  a.session.add_program("g", graph);
  const Plan& plan = a.session.plan("g", {});
  int reorders = 0, nhwc = 0;
  for (const Step& step : plan.steps) reorders += step.op == "Reorder";
  for (const Slot& slot : plan.slots) nhwc += slot.type.layout == Layout::nhwc;
  EXPECT_LE(reorders, 4) << dump(plan);
  EXPECT_GE(nhwc, 10) << dump(plan);
  Interpreter reference(graph, 1);
  std::mt19937 random(7);
  const auto values = [&](const TensorType& type) {
    return noise(random, static_shape(type.shape)).cast(type.dtype);
  };
  for (const ValueId p : graph.params) {
    HostTensor value = values(graph.value(p).type);
    if (graph.value(p).type.dtype == DType::f64) value = HostTensor::of<double>({5}, {0.01, 1, 0.9, 0, 0});
    a.session.set_state(graph.value(p).name, value);
    reference.set_state(graph.value(p).name, value);
  }
  for (int step = 0; step < 3; ++step) {
    const Feeds feeds = {{"x", values(TensorType::parse("f32[6,3,8,8]"))},
                         {"t", HostTensor::of<std::int64_t>({6}, {0, 1, 2, 3, 4, 0})}};
    EXPECT_NEAR(a.session.run("g", feeds).at("loss").as_double(0),
                reference.run(feeds).at("loss").as_double(0), 1e-3);
  }
  for (const auto& [name, want] : reference.state()) {
    const HostTensor got = a.session.get_state(name);
    double error = 0, norm = 0;
    for (std::int64_t i = 0; i < want.numel(); ++i) {
      error += (got.as_double(i) - want.as_double(i)) * (got.as_double(i) - want.as_double(i));
      norm += want.as_double(i) * want.as_double(i);
    }
    EXPECT_LE(error, 1e-8 * norm) << name;
  }
}

}  // namespace
}  // namespace onnxddp

// N ranks compute what one rank computes on the union of their batches, and all ranks hold equal bits.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <random>

#include "distributed/communicator.h"
#include "distributed/distribute.h"
#include "executor/device.h"
#include "executor/kernel.h"
#include "executor/plan/session.h"
#include "graph/pass.h"
#include "graph/passes/passes.h"
#include "graph/text.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

using States = std::map<std::string, HostTensor>;

HostTensor random_tensor(Ints shape, std::mt19937& random) {
  HostTensor out(DType::f64, std::move(shape));
  std::normal_distribution<double> normal;
  for (std::int64_t i = 0; i < out.numel(); ++i) out.mutable_data<double>()[i] = normal(random);
  return out;
}

struct Model {
  Graph graph{"model"};
  States values;
  bool classes = false;
  Ints row = {6};  // shape of one sample
};

/// A random network in float64: dense layers or convolutions, batch norms, activations, a shared weight.
Model random_model(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  Model model;
  model.classes = pick(0, 1) == 1;
  const bool image = pick(0, 1) == 1;
  if (image) model.row = {2, 5, 4};
  Shape shape = {Dim::symbol("N")};
  for (std::int64_t d : model.row) shape.push_back(d);
  Graph& g = model.graph;
  Builder b(g);
  b.set_hint("h");
  const auto param = [&](const std::string& name, Ints dims, double scale, double shift = 0) {
    HostTensor value = random_tensor(dims, random);
    for (std::int64_t i = 0; i < value.numel(); ++i)
      value.mutable_data<double>()[i] = shift + scale * value.as_double(i);
    const ValueId id = g.add_param(name, {DType::f64, to_shape(dims)});
    model.values.emplace(g.value(id).name, value);
    return b.expr(id);
  };
  const auto batch_norm = [&](Expr x) {
    const std::int64_t c = x.shape()[1].value();
    const Expr scale = param("scale", {c}, 0.2, 1), bias = param("bias", {c}, 0.2);
    const ValueId mean = g.add_param("mean", {DType::f64, {c}}, Kind::state),
                  var = g.add_param("var", {DType::f64, {c}}, Kind::state);
    model.values.emplace(g.value(mean).name, HostTensor(DType::f64, {c}));
    model.values.emplace(g.value(var).name, HostTensor::full(DType::f64, {c}, 1));
    const std::vector<ValueId> out = b.emit("BatchNormalization", {x.id(), scale.id(), bias.id(), mean, var},
                                            {{"training", std::int64_t{1}}}, {}, 3);
    g.updates.push_back({mean, out[1]});
    g.updates.push_back({var, out[2]});
    return b.expr(out[0]);
  };
  Expr h = b.expr(g.add_input("x", {DType::f64, shape}));
  if (image) {
    for (std::int64_t i = pick(1, 2); i > 0; --i) {
      const std::int64_t in = h.shape()[1].value(), out = pick(2, 4), stride = pick(1, 2);
      h = call("Conv", {h, param("kernel", {out, in, 3, 3}, 0.4)},
               {{"strides", Ints{stride, 1}}, {"pads", Ints{1, 1, 0, 1}}, {"dilations", Ints{1, 1}}});
      if (pick(0, 2) > 0) h = batch_norm(h);
      h = call("Relu", {h});
    }
    h = reshape(h, {h.shape()[0], h.shape()[1] * h.shape()[2] * h.shape()[3]});
  }
  for (std::int64_t i = pick(1, 3); i > 0; --i) {
    const std::int64_t in = h.shape()[1].value();
    const Expr w = param("w", {in, pick(3, 5)}, 0.5);
    h = matmul(h, w);
    if (pick(0, 1) == 1) h = batch_norm(h);
    h = call(pick(0, 1) == 1 ? "Tanh" : "Sigmoid", {h + param("b", {h.shape()[1].value()}, 0.3)});
    if (pick(0, 3) == 0) h = h * (1 + reduce_mean(w * w, {}, false));  // the weight has a second use
  }
  g.outputs.push_back({"y", h.id()});
  return model;
}

struct Setting {
  int ranks = 1, accumulate = 1;
  bool sync = true;
  OptimizerSpec optimizer;
  std::string bucket_policy = "planned";
  double bucket_mb = 0;
};

struct Programs {
  Graph step, micro;
  Dim count;
};

Programs make_programs(const Model& model, const Setting& setting) {
  Programs out;
  Graph g = model.graph;
  canonicalise(g);
  const TensorType& y = g.value(g.outputs[0].value).type;
  const TensorType target = model.classes ? TensorType{DType::i64, {y.shape[0]}} : y;
  out.count = attach_loss(g, model.classes ? "cross_entropy" : "mse", {}, "", "t", target).count;
  autodiff(g);
  simplify(g, evaluate_constant);
  DistributeOptions distribution{.ranks = setting.ranks,
                                 .sync_batch_norm = setting.sync,
                                 .bucket_policy = setting.bucket_policy,
                                 .bucket_mb = setting.bucket_mb};
  out.micro = g;
  accumulate_micro(out.micro);
  if (setting.accumulate > 1) accumulate_step(g);
  distribute(g, distribution);
  distribution.reduce_gradients = false;
  distribute(out.micro, distribution);
  guard(g, {.clip_norm = 0.5});
  attach_optimizer(g, setting.optimizer);
  simplify(g, evaluate_constant);
  verify(g);
  verify(out.micro);
  out.step = std::move(g);
  return out;
}

/// Five optimizer steps; every rank takes its rows of the union (rank-major within a micro-batch). Returns
/// the states of every rank and rank 0's losses.
std::vector<States> train(const Model& model, const Setting& setting, std::int64_t rows, unsigned data_seed,
                          std::vector<double>* losses) {
  const Programs programs = make_programs(model, setting);
  std::vector<States> out(static_cast<std::size_t>(setting.ranks));
  std::mutex mutex;
  run_ranks(setting.ranks, [&](Communicator& communicator) {
    const auto device = make_cpu_device(1);
    Session session(*device, communicator);
    session.add_program("step", programs.step);
    session.add_program("micro", programs.micro);
    for (const auto& [name, value] : model.values)
      if (session.has_state(name)) session.set_state(name, value);
    std::vector<double> table = {0.05, 0};
    for (double value : hyper_defaults(setting.optimizer)) table.push_back(value);
    std::mt19937 random(data_seed);
    for (int step = 0; step < 5; ++step) {
      table[1] = step + 1;
      session.set_state("optimizer.group0",
                        HostTensor::of<double>({static_cast<std::int64_t>(table.size())}, table));
      const double denominator = static_cast<double>(programs.count.bind({{"N", rows}}).value() *
                                                     setting.ranks * setting.accumulate);
      session.set_state("loss.denominator", HostTensor::scalar(denominator));
      for (int micro = 0; micro < setting.accumulate; ++micro) {
        Feeds feeds;
        for (int r = 0; r < setting.ranks; ++r) {
          Ints shape = model.row;
          shape.insert(shape.begin(), rows);
          const HostTensor x = random_tensor(shape, random);
          const Dim width = model.graph.value(model.graph.outputs[0].value).type.shape[1];
          HostTensor t = random_tensor({rows, width.value()}, random);
          if (model.classes) {
            t = HostTensor(DType::i64, {rows});
            for (std::int64_t i = 0; i < rows; ++i)
              t.mutable_data<std::int64_t>()[i] =
                  static_cast<std::int64_t>(random() % static_cast<unsigned>(width.value()));
          }
          if (r == communicator.rank()) feeds = {{"x", x}, {"t", t}};
        }
        const bool last = micro + 1 == setting.accumulate;
        const Feeds results = session.run(last ? "step" : "micro", feeds);
        if (last && communicator.rank() == 0 && losses != nullptr)
          losses->push_back(results.at("loss").as_double(0));
      }
    }
    States states;
    for (const std::string& name : session.state_names()) states.emplace(name, session.get_state(name));
    const std::lock_guard lock(mutex);
    out[static_cast<std::size_t>(communicator.rank())] = std::move(states);
  });
  return out;
}

double worst_difference(const Model& model, const States& a, const States& b) {
  double worst = 0;
  for (const auto& [name, value] : model.values)
    for (std::int64_t i = 0; i < value.numel(); ++i)
      worst = std::max(worst, std::fabs(a.at(name).as_double(i) - b.at(name).as_double(i)));
  return worst;
}

OptimizerSpec random_optimizer(unsigned seed) {
  switch (seed % 4) {
    case 0: return {"sgd", {{"momentum", "0.9"}, {"nesterov", "true"}}};
    case 1: return {"sgd", {{"momentum", "0.5"}, {"dampening", "0.1"}, {"weight_decay", "0.01"}}};
    // A large eps keeps the division by sqrt(v) from amplifying rounding noise of vanishing gradients.
    case 2: return {"adam", {{"eps", "0.1"}}};
    default: return {"adamw", {{"eps", "0.1"}, {"amsgrad", "true"}}};
  }
}

class DdpProperty : public ::testing::TestWithParam<unsigned> {};

TEST_P(DdpProperty, RanksEqualOneRankOnTheUnionOfTheirBatches) {
  const unsigned seed = GetParam();
  const Model model = random_model(seed);
  for (int ranks : {1, 2, 3}) {
    Setting setting{.ranks = ranks,
                    .optimizer = random_optimizer(seed),
                    .bucket_policy = seed % 2 == 0 ? "planned" : "torch",
                    .bucket_mb = seed % 3 == 0 ? 1e-4 : 0};
    std::vector<double> losses, union_losses;
    const std::vector<States> parallel = train(model, setting, 4, seed, &losses);
    for (int r = 1; r < ranks; ++r)
      for (const auto& [name, value] : parallel[0])
        ASSERT_TRUE(value == parallel[static_cast<std::size_t>(r)].at(name))
            << name << " differs on rank " << r;
    // One rank on the union: the same random stream, read as one batch, needs the rows in the same order.
    setting.ranks = 1;
    Model whole = model;
    const Programs programs = make_programs(whole, setting);
    const auto device = make_cpu_device(1);
    run_ranks(1, [&](Communicator& communicator) {
      Session session(*device, communicator);
      session.add_program("step", programs.step);
      for (const auto& [name, value] : model.values) session.set_state(name, value);
      std::vector<double> table = {0.05, 0};
      for (double value : hyper_defaults(setting.optimizer)) table.push_back(value);
      std::mt19937 random(seed);
      for (int step = 0; step < 5; ++step) {
        table[1] = step + 1;
        session.set_state("optimizer.group0",
                          HostTensor::of<double>({static_cast<std::int64_t>(table.size())}, table));
        const std::int64_t rows = 4 * ranks;
        session.set_state(
            "loss.denominator",
            HostTensor::scalar(static_cast<double>(programs.count.bind({{"N", rows}}).value())));
        Ints shape = model.row;
        shape.insert(shape.begin(), rows);
        HostTensor x(DType::f64, shape);
        const std::int64_t width = model.graph.value(model.graph.outputs[0].value).type.shape[1].value();
        HostTensor t = model.classes ? HostTensor(DType::i64, {rows}) : HostTensor(DType::f64, {rows, width});
        for (int r = 0; r < ranks; ++r) {
          Ints part = model.row;
          part.insert(part.begin(), 4);
          const HostTensor px = random_tensor(part, random);
          HostTensor pt = random_tensor({4, width}, random);
          if (model.classes) {
            pt = HostTensor(DType::i64, {4});
            for (int i = 0; i < 4; ++i)
              pt.mutable_data<std::int64_t>()[i] =
                  static_cast<std::int64_t>(random() % static_cast<unsigned>(width));
          }
          std::memcpy(x.mutable_raw() + static_cast<std::size_t>(r) * px.bytes(), px.raw(), px.bytes());
          std::memcpy(t.mutable_raw() + static_cast<std::size_t>(r) * pt.bytes(), pt.raw(), pt.bytes());
        }
        union_losses.push_back(session.run("step", {{"x", x}, {"t", t}}).at("loss").as_double(0));
      }
      States states;
      for (const std::string& name : session.state_names()) states.emplace(name, session.get_state(name));
      EXPECT_LE(worst_difference(model, parallel[0], states), 1e-12) << "ranks " << ranks;
    });
    for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], union_losses[i], 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DdpProperty, ::testing::Range(0U, 12U));

TEST(Ddp, AccumulationEqualsOneLargeBatchWithoutBatchNorm) {
  Model model;
  Builder b(model.graph);
  b.set_hint("h");
  std::mt19937 random(5);
  model.row = {3};
  const Expr x = b.expr(model.graph.add_input("x", TensorType::parse("f64[N,3]")));
  model.values["w"] = random_tensor({3, 2}, random);
  const Expr w = b.expr(model.graph.add_param("w", TensorType::parse("f64[3,2]")));
  model.graph.outputs.push_back({"y", call("Tanh", {matmul(x, w)}).id()});
  Setting setting{.ranks = 2, .accumulate = 2, .optimizer = {"sgd", {{"momentum", "0.9"}}}};
  std::vector<double> losses, large_losses;
  const std::vector<States> small = train(model, setting, 3, 9, &losses);
  // Micro-batches of 2 ranks in the random stream's order are 4 blocks of 3 rows: 4 ranks without
  // accumulation see the same.
  setting = {.ranks = 4, .accumulate = 1, .optimizer = setting.optimizer};
  const std::vector<States> large = train(model, setting, 3, 9, &large_losses);
  EXPECT_LE(worst_difference(model, small[0], large[0]), 1e-12);
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], large_losses[i], 1e-12);
}

// ddp.md 1.4: PyTorch's SyncBatchNorm formula over ranks with 3 rows and 1 row, float64.
TEST(SyncBatchNorm, GoldenOfUnequalBatches) {
  Graph graph = parse(testing::unindent(R"(
    graph g v1
    input  x: f64[N,1]
    input  dy: f64[N,1]
    state  scale: f64[1]
    state  bias: f64[1]
    state  mean: f64[1]
    state  var: f64[1]
      stats: f64[4] = BatchStats(x)
      y: f64[N,1] = BatchNormApply(x, scale, bias, stats) {epsilon=1e-05}
      mean.next: f64[1], var.next: f64[1] = RunningStats(mean, var, stats) {momentum=0.9}
      dbias: f64[1], dscale: f64[1] = BatchNormGradSums(dy, x, stats) {epsilon=1e-05}
      dx: f64[N,1] = BatchNormGradApply(dy, x, scale, stats, dbias, dscale) {epsilon=1e-05}
      sum: f64[2] = Concat(dbias, dscale) {axis=0}
    update mean <- mean.next
    update var <- var.next
    output y
    output dx
    output sum
  )"));
  distribute(graph, {.ranks = 2, .sync_batch_norm = true, .reduce_gradients = false});
  const std::vector<std::vector<double>> x = {{1, 2, 3}, {10}}, dy = {{1.0 / 3, 0, -1.0 / 3}, {2}};
  const std::vector<std::vector<double>> y = {{-0.8485277980128058, -0.5656851986752038, -0.2828425993376019},
                                              {1.6970555960256115}};
  const std::vector<std::vector<double>> dx = {
      {0.14519238046038474, -0.013199423879922031, -0.1715912282202288}, {0.03959827163976609}};
  std::mutex mutex;
  double dscale = 0, dbias = 0;
  run_ranks(2, [&](Communicator& communicator) {
    const auto r = static_cast<std::size_t>(communicator.rank());
    const auto device = make_cpu_device(1);
    Session session(*device, communicator);
    session.add_program("step", graph);
    session.set_state("scale", HostTensor::of<double>({1}, {1}));
    session.set_state("var", HostTensor::of<double>({1}, {1}));
    const auto rows = static_cast<std::int64_t>(x[r].size());
    const Feeds out = session.run("step", {{"x", HostTensor::of<double>({rows, 1}, x[r])},
                                           {"dy", HostTensor::of<double>({rows, 1}, dy[r])}});
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < x[r].size(); ++i) {
      EXPECT_NEAR(out.at("y").data<double>()[i], y[r][i], 1e-12);
      EXPECT_NEAR(out.at("dx").data<double>()[i], dx[r][i], 1e-12);
    }
    dbias += out.at("sum").data<double>()[0];
    dscale += out.at("sum").data<double>()[1];
    EXPECT_NEAR(session.get_state("mean").as_double(0), 0.4, 1e-12);
    EXPECT_NEAR(session.get_state("var").as_double(0), 2.566666666666667, 1e-12);
  });
  EXPECT_NEAR(dscale, 3.2055494591594886, 1e-12);
  EXPECT_NEAR(dbias, 2.0, 1e-12);
}

}  // namespace
}  // namespace onnxddp

// A small network that trains for some steps on any device: what the table's kernels make together.
#pragma once

#include <cmath>
#include <map>
#include <random>
#include <string>

#include "distributed/communicator.h"
#include "distributed/distribute.h"
#include "executor/plan/session.h"
#include "graph/pass.h"
#include "graph/passes/passes.h"
#include "graph/text.h"

namespace onnxddp::cuda {

using States = std::map<std::string, HostTensor>;

/// Convolutions, batch norm, pools, a residual sum; cross-entropy, clipped gradients; N samples a rank.
inline Graph training_step(const OptimizerSpec& optimizer, int ranks) {
  Graph g = parse(R"(
    graph cnn v1
    input  x: f32[N,3,8,8]
    param  w1: f32[8,3,3,3]
    param  b1: f32[8]
    param  w2: f32[8,4,3,3]
    param  scale: f32[8]
    param  bias: f32[8]
    state  mean: f32[8]
    state  var: f32[8]
    param  w3: f32[5,32]
    param  b3: f32[5]
      c1: f32[N,8,8,8] = Conv(x, w1, b1) {dilations=[1,1], group=1, pads=[1,1,1,1], strides=[1,1]}
      a1: f32[N,8,8,8] = Relu(c1)
      c2: f32[N,8,8,8] = Conv(a1, w2) {dilations=[1,1], group=2, pads=[1,1,1,1], strides=[1,1]}
      n2: f32[N,8,8,8], mean.next: f32[8], var.next: f32[8] = BatchNormalization(c2, scale, bias, mean, var) {training=1}
      r: f32[N,8,8,8] = Add(n2, a1)
      a2: f32[N,8,8,8] = Sigmoid(r)
      p: f32[N,8,4,4] = MaxPool(a2) {kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
      q: f32[N,8,2,2] = AveragePool(p) {kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
      f: f32[N,32] = Reshape(q) {shape=[N,32]}
      y: f32[N,5] = Gemm(f, w3, b3) {transB=1}
    update mean <- mean.next
    update var <- var.next
    output y
  )");
  canonicalise(g);
  attach_loss(g, "cross_entropy", {}, "", "t", {DType::i64, {Dim::symbol("N")}});
  autodiff(g);
  simplify(g, evaluate_constant);
  distribute(g, {.ranks = ranks, .sync_batch_norm = true});
  guard(g, {.clip_norm = 0.5});
  attach_optimizer(g, optimizer);
  simplify(g, evaluate_constant);
  verify(g);
  return g;
}

inline HostTensor noise(const Ints& shape, std::mt19937& random) {
  HostTensor t(DType::f32, shape);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (std::int64_t i = 0; i < t.numel(); ++i) t.mutable_data<float>()[i] = uniform(random);
  return t;
}

/// All states after three steps of this rank; every rank has four samples.
inline States train(Device& device, Communicator& communicator, const OptimizerSpec& optimizer) {
  constexpr std::int64_t kRows = 4;
  States states;
  device.on_lane(onnxddp::Lane::compute, [&] {
    Session session(device, communicator);
    session.add_program("step", training_step(optimizer, communicator.size()));
    std::mt19937 random(5);
    for (const std::string& name : session.state_names()) {
      const HostTensor old = session.get_state(name);
      if (old.dtype() == DType::f32 && old.numel() > 1 && name.find('.') == std::string::npos)
        session.set_state(name, noise(old.shape(), random));
    }
    session.set_state("var", HostTensor::full(DType::f32, {8}, 1));
    session.set_state("loss.denominator",
                      HostTensor::scalar(static_cast<float>(kRows * communicator.size())));
    std::vector<double> table = {0.05, 0};
    for (const double value : hyper_defaults(optimizer)) table.push_back(value);
    for (int step = 0; step < 3; ++step) {
      table[1] = step + 1;
      session.set_state("optimizer.group0",
                        HostTensor::of<double>({static_cast<std::int64_t>(table.size())}, table));
      for (int rank = 0; rank < communicator.size(); ++rank) {
        Feeds feeds = {{"x", noise({kRows, 3, 8, 8}, random)},
                       {"t", HostTensor::of<std::int64_t>({kRows}, {rank, 1, 4, step})}};
        if (rank == communicator.rank()) session.run("step", feeds);
      }
    }
    for (const std::string& name : session.state_names()) states.emplace(name, session.get_state(name));
  });
  return states;
}

/// Root of the mean square of the differences over that of `expected`, of the worst state.
inline double worst_difference(const States& actual, const States& expected) {
  double worst = actual.size() == expected.size() ? 0 : INFINITY;
  for (const auto& [name, want] : expected) {
    const HostTensor& got = actual.at(name);
    double error = 0, norm = 1e-12;
    for (std::int64_t i = 0; i < want.numel(); ++i) {
      error += std::pow(got.as_double(i) - want.as_double(i), 2);
      norm += std::pow(want.as_double(i), 2);
    }
    worst = std::max(worst, std::isfinite(error) ? std::sqrt(error / norm) : INFINITY);
  }
  return worst;
}

}  // namespace onnxddp::cuda

// Every op of the registry on the CPU, generated from the entries' samples: nobody writes these tests for a
// new op.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "executor/kernel.h"
#include "graph/builder.h"
#include "graph/passes/passes.h"
#include "graph/registry.h"
#include "tests/executor/kernel_case.h"

namespace onnxddp {
namespace {

using testing::difference;
using testing::each_sample;
using testing::random_inputs;
using testing::run_graph;
using testing::run_node;

bool has_kernel(const OpDef& op) { return cpu_kernels().kernels.count(op.name) > 0; }

NodeId node_of(const Graph& graph) { return graph.order.at(0); }

bool reads_floats(const Graph& graph) {
  for (ValueId x : graph.node(node_of(graph)).inputs) {
    if (x && is_float(graph.value(x).type.dtype)) return true;
  }
  return false;
}

const std::vector<DType> kBoth = {DType::f32, DType::f64};

TEST(Ops, HaveAKernelOrADecomposition) {
  for (const OpDef* op : all_ops()) {
    if (has_kernel(*op) || op->decompose || op->fold_dims) continue;
    ADD_FAILURE() << op->name << " has neither";
  }
}

TEST(Ops, KernelsAreOfKnownOps) {
  for (const auto& [name, kernel] : cpu_kernels().kernels) {
    EXPECT_EQ(name, kernel.op);
    EXPECT_TRUE(name == "Reorder" || default_registry().find(name)) << name;
  }
}

TEST(Ops, WriteWhatIsInferredAndNothingElse) {
  each_sample([](const OpDef& op, const std::string& text) {
    if (!has_kernel(op)) return;
    for (DType dtype : kBoth) {
      const Sample sample = parse_sample(text, dtype);
      run_node(sample.graph, node_of(sample.graph), random_inputs(sample, 1));
    }
  });
}

TEST(Ops, AgreeInEveryLayoutAndNumberOfThreads) {
  each_sample([](const OpDef& op, const std::string& text) {
    if (!has_kernel(op)) return;
    for (DType dtype : kBoth) {
      const Sample sample = parse_sample(text, dtype);
      const NodeId node = node_of(sample.graph);
      const auto inputs = random_inputs(sample, 2);
      const auto dense = run_node(sample.graph, node, inputs);
      const auto nhwc = run_node(sample.graph, node, inputs, {.nhwc = true});
      const auto threads = run_node(sample.graph, node, inputs, {.nhwc = true, .threads = 3});
      for (std::size_t i = 0; i < dense.size(); ++i) {
        EXPECT_LE(difference(nhwc[i], dense[i]), dtype == DType::f32 ? 2e-6 : 1e-14)
            << "N,H,W,C, output " << i;
        EXPECT_LE(difference(threads[i], dense[i]), dtype == DType::f32 ? 2e-6 : 1e-14)
            << "3 threads, output " << i;
      }
    }
  });
}

TEST(Ops, ComputeInPlaceWhereTheySay) {
  each_sample([](const OpDef& op, const std::string& text) {
    if (!has_kernel(op)) return;
    const Sample sample = parse_sample(text);
    const Node& node = sample.graph.node(node_of(sample.graph));
    const auto inputs = random_inputs(sample, 3);
    for (const auto& [in, out] : op.traits.in_place) {
      const auto i = static_cast<std::size_t>(in), o = static_cast<std::size_t>(out);
      if (i >= node.inputs.size() || !node.inputs[i] || o >= node.outputs.size()) continue;
      if (sample.graph.value(node.inputs[i]).type != sample.graph.value(node.outputs[o]).type) continue;
      const auto apart = run_node(sample.graph, node_of(sample.graph), inputs);
      const auto shared = run_node(sample.graph, node_of(sample.graph), inputs, {.in_place = {in, out}});
      for (std::size_t k = 0; k < apart.size(); ++k)
        EXPECT_EQ(shared[k], apart[k]) << "output " << k << ", input " << in << " in place of output " << out;
    }
  });
}

TEST(Ops, ComputeTheSameInBothPrecisions) {
  each_sample([](const OpDef& op, const std::string& text) {
    if (!has_kernel(op)) return;
    const Sample narrow = parse_sample(text), wide = parse_sample(text, DType::f64);
    if (!reads_floats(narrow.graph)) return;
    const auto a = run_node(narrow.graph, node_of(narrow.graph), random_inputs(narrow, 4));
    const auto b = run_node(wide.graph, node_of(wide.graph), random_inputs(wide, 4));
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_LE(difference(a[i], b[i]), 5e-6) << "output " << i;
  });
}

TEST(Ops, EqualTheirDecomposition) {
  each_sample([](const OpDef& op, const std::string& text) {
    if (!op.decompose || !has_kernel(op)) return;
    const Sample sample = parse_sample(text, DType::f64);
    const auto inputs = random_inputs(sample, 5);
    const auto whole = run_node(sample.graph, node_of(sample.graph), inputs);
    Graph parts = sample.graph;
    const Node node = parts.node(node_of(parts));
    parts.order.clear();
    parts.outputs.clear();
    Builder builder(parts);
    Compose compose(builder, node);
    op.decompose(compose);
    for (std::size_t i = 0; i < compose.results().size(); ++i) {
      if (compose.results()[i]) parts.outputs.push_back({cat("y", i), compose.results()[i]});
    }
    std::map<ValueId, HostTensor> values;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (node.inputs[i]) values[node.inputs[i]] = inputs[i];
    }
    for (const auto& [name, value] : run_graph(parts, values)) {
      EXPECT_LE(difference(whole.at(static_cast<std::size_t>(std::stoi(name.substr(1)))), value), 1e-12)
          << name;
    }
  });
}

TEST(Ops, AreTheSameAfterDumpAndParse) {
  each_sample([](const OpDef&, const std::string& text) {
    for (DType dtype : kBoth) {
      const Sample sample = parse_sample(text, dtype);
      Blobs blobs;
      const std::string once = dump(sample.graph, &blobs);
      EXPECT_EQ(dump(parse(once, blobs)), once);
    }
  });
}

/// The sample with its float inputs as params and the scalar output `loss` = sum of the float outputs times
/// random weights.
struct Differentiable {
  Graph graph;
  std::vector<ValueId> params;
  std::vector<std::pair<double, double>> ranges;
  bool any = false;
};

Graph with_params(const Sample& sample) {
  Blobs blobs;
  std::string text = dump(sample.graph, &blobs);
  for (ValueId x : sample.graph.inputs) {
    const Value& value = sample.graph.value(x);
    if (!is_float(value.type.dtype)) continue;
    const std::string before = "input  " + value.name + ":";
    const std::size_t at = text.find(before);
    CHECK(at != std::string::npos, text);
    text.replace(at, 7, "param  ");
  }
  return parse(text, blobs);
}

Differentiable differentiable(const OpDef& op, const std::string& text) {
  const Sample sample = parse_sample(text, DType::f64);
  Differentiable d{with_params(sample), {}, {}, false};
  Builder builder(d.graph);
  Expr loss;
  for (std::size_t i = 0; i < d.graph.outputs.size(); ++i) {
    const auto& fixed = op.traits.nondifferentiable_outputs;
    if (std::find(fixed.begin(), fixed.end(), static_cast<int>(i)) != fixed.end()) continue;
    const Expr y = builder.expr(d.graph.outputs[i].value);
    if (y.dtype() != DType::f64) continue;
    const Expr weights = builder.constant(
        testing::random_tensor(y.dtype(), static_shape(y.shape()), 77 + static_cast<unsigned>(i)));
    const Expr term = y.rank() == 0 ? y * weights : reduce_sum(y * weights, {}, false);
    loss = loss ? loss + term : term;
  }
  if (!loss) return d;
  d.any = true;
  d.graph.outputs = {{"loss", loss.id()}};
  for (ValueId p : d.graph.params) {
    const auto range = sample.ranges.find(d.graph.value(p).name);
    d.params.push_back(p);
    d.ranges.push_back(range == sample.ranges.end() ? std::pair(-1.0, 1.0) : range->second);
  }
  return d;
}

/// A point away from the kinks of the op.
HostTensor point(const OpDef& op, const Ints& shape, std::pair<double, double> range, unsigned seed) {
  HostTensor t = testing::random_tensor(DType::f64, shape, seed, range.first, range.second);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    for (double kink : op.kinks) {
      if (std::abs(t.as_double(i) - kink) < 1e-3) t.set_double(i, kink + 2e-3);
    }
  }
  return t;
}

double dot(const HostTensor& a, const HostTensor& b) {
  double total = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) total += a.as_double(i) * b.as_double(i);
  return total;
}

TEST(Ops, GradientsEqualFiniteDifferences) {
  each_sample([](const OpDef& op, const std::string& text) {
    if (gradient_kind(op) == GradientKind::none) return;
    Differentiable d = differentiable(op, text);
    if (!d.any || d.params.empty()) return;
    canonicalise(d.graph);
    const Graph forward = d.graph;
    autodiff(d.graph, "loss");
    const std::vector<std::pair<ValueId, ValueId>> found = gradients(d.graph);
    for (const auto& [param, gradient] : found)
      d.graph.outputs.push_back({cat("grad.", param.index), gradient});

    const auto has_gradient = [&](ValueId param) {
      return std::any_of(found.begin(), found.end(), [&](const auto& entry) { return entry.first == param; });
    };
    std::map<ValueId, HostTensor> at;
    std::map<ValueId, HostTensor> along;
    for (ValueId x : d.graph.inputs) {
      at[x] = testing::random_tensor(d.graph.value(x).type.dtype, static_shape(d.graph.value(x).type.shape),
                                     300, -5, 6);
    }
    for (std::size_t i = 0; i < d.params.size(); ++i) {
      const Ints shape = static_shape(d.graph.value(d.params[i]).type.shape);
      at[d.params[i]] = point(op, shape, d.ranges[i], 100 + static_cast<unsigned>(i));
      // Buffers (a batch norm's running statistics) have no gradient; where it is said to be zero, it is
      // tested to be.
      if (!has_gradient(d.params[i]) && gradient_kind(op) != GradientKind::zero) continue;
      along[d.params[i]] = testing::random_tensor(DType::f64, shape, 200 + static_cast<unsigned>(i));
    }
    const auto results = run_graph(d.graph, at);
    double analytic = 0, gradient_norm = 0, direction_norm = 0;
    for (const auto& [param, gradient] : found) {
      const HostTensor& g = results.at(cat("grad.", param.index));
      ASSERT_EQ(g.shape(), at[param].shape());
      analytic += dot(g, along[param]);
      gradient_norm += dot(g, g);
    }
    constexpr double kStep = 1e-5;
    const auto loss_at = [&](double step) {
      std::map<ValueId, HostTensor> moved = at;
      for (const auto& [param, v] : along) {
        for (std::int64_t k = 0; k < v.numel(); ++k)
          moved[param].set_double(k, moved[param].as_double(k) + step * v.as_double(k));
      }
      return run_graph(forward, moved).at("loss").as_double(0);
    };
    for (const auto& [param, v] : along) direction_norm += dot(v, v);
    const double numeric = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
    const double scale =
        std::max({std::abs(numeric), std::sqrt(gradient_norm * direction_norm) * 1e-3, 1e-4});
    EXPECT_LE(std::abs(numeric - analytic), 1e-6 * scale)
        << "finite difference " << numeric << ", gradient " << analytic;
  });
}

}  // namespace
}  // namespace onnxddp

#include "tests/executor/kernel_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "graph/op.h"

namespace onnxddp::testing {
namespace {

constexpr std::size_t kMargin = 64;

/// 64-byte aligned bytes with a margin behind them, all filled with a pattern.
class Buffer {
 public:
  Buffer(std::size_t bytes, int pattern)
      : bytes_(bytes), pattern_(pattern), data_(DType::u8, {static_cast<std::int64_t>(bytes + kMargin)}) {
    std::memset(data_.mutable_raw(), pattern, bytes + kMargin);
  }
  void* data() { return data_.mutable_raw(); }
  bool margin_is_whole() {
    const auto* end = static_cast<const unsigned char*>(data()) + bytes_;
    return std::all_of(end, end + kMargin,
                       [&](unsigned char c) { return c == static_cast<unsigned char>(pattern_); });
  }

 private:
  std::size_t bytes_;
  int pattern_;
  HostTensor data_;
};

void reorder(const SlotType& from, const SlotType& to, const void* in, void* out) {
  const Graph graph;
  const Node node;
  PlanContext context(graph, node, {from}, {to}, 1);
  const Run run = cpu_kernels().find("Reorder", from.dtype)->prepare(context);
  run({&in, &out, nullptr, nullptr});
}

/// As the planner does it: N,H,W,C is at hand, the kernel says what it wants.
void choose(const Kernel& kernel, PlanContext& c) {
  const auto image = [](const SlotType& t) { return t.shape.size() == 4; };
  if (kernel.rule == LayoutRule::dense) return;
  for (SlotType& t : c.inputs) t.layout = image(t) ? Layout::nhwc : Layout::dense;
  if (kernel.rule == LayoutRule::choose) {
    LayoutChoice choice = kernel.layouts(c);
    choice.inputs.resize(c.inputs.size(), Layout::dense);
    choice.outputs.resize(c.outputs.size(), Layout::dense);
    for (std::size_t i = 0; i < c.inputs.size(); ++i) c.inputs[i].layout = choice.inputs[i];
    for (std::size_t i = 0; i < c.outputs.size(); ++i) c.outputs[i].layout = choice.outputs[i];
    return;
  }
  for (SlotType& y : c.outputs) y.layout = image(y) ? Layout::nhwc : Layout::dense;
  for (SlotType& x : c.inputs)
    x.layout = image(x) && x.shape == c.outputs[0].shape ? Layout::nhwc : Layout::dense;
}

PlanContext context_of(const Graph& graph, const Node& node, const std::vector<HostTensor>& inputs,
                       int threads) {
  std::vector<SlotType> in, out;
  for (const HostTensor& t : inputs) in.push_back({t.dtype(), t.shape(), Layout::dense});
  for (ValueId y : node.outputs)
    out.push_back({graph.value(y).type.dtype, static_shape(graph.value(y).type.shape), Layout::dense});
  return PlanContext(graph, node, std::move(in), std::move(out), threads);
}

DType dtype_of_node(const std::vector<SlotType>& inputs) {
  for (const SlotType& t : inputs)
    if (is_float(t.dtype)) return t.dtype;
  return inputs.empty() ? DType::f32 : inputs[0].dtype;
}

std::vector<HostTensor> run_once(const Graph& graph, const Node& node, const std::vector<HostTensor>& inputs,
                                 const RunOptions& o, int pattern) {
  PlanContext c = context_of(graph, node, inputs, o.threads);
  const Kernel* kernel = cpu_kernels().find(node.op->name, dtype_of_node(c.inputs));
  if (!kernel) throw Error(cat("no kernel for ", node.op->name));
  if (o.nhwc) choose(*kernel, c);
  const Run run = kernel->prepare(c);
  std::vector<HostTensor> held;
  std::vector<const void*> reads;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    held.emplace_back(inputs[i].dtype(), inputs[i].shape());
    const SlotType dense{c.inputs[i].dtype, c.inputs[i].shape, Layout::dense};
    if (node.inputs[i]) reorder(dense, c.inputs[i], inputs[i].raw(), held.back().mutable_raw());
    reads.push_back(node.inputs[i] ? held.back().mutable_raw() : nullptr);
  }
  std::vector<HostTensor> before = held;
  for (HostTensor& t : before) t.mutable_raw();  // its own bytes
  std::vector<Buffer> buffers;
  std::vector<void*> writes;
  for (const SlotType& t : c.outputs) buffers.emplace_back(t.bytes(), pattern);
  for (std::size_t i = 0; i < buffers.size(); ++i) writes.push_back(buffers[i].data());
  if (o.in_place.first >= 0)
    writes[static_cast<std::size_t>(o.in_place.second)] =
        const_cast<void*>(reads[static_cast<std::size_t>(o.in_place.first)]);
  Buffer scratch(c.scratch_bytes, pattern);
  run({reads.data(), writes.data(), scratch.data(), nullptr});
  EXPECT_TRUE(scratch.margin_is_whole()) << "the kernel writes behind its scratch";
  std::vector<HostTensor> results;
  for (std::size_t i = 0; i < writes.size(); ++i) {
    EXPECT_TRUE(buffers[i].margin_is_whole()) << "the kernel writes behind output " << i;
    const SlotType dense{c.outputs[i].dtype, c.outputs[i].shape, Layout::dense};
    results.emplace_back(dense.dtype, dense.shape);
    reorder(c.outputs[i], dense, writes[i], results.back().mutable_raw());
  }
  for (std::size_t i = 0; i < held.size(); ++i) {
    if (!node.inputs[i] || before[i].bytes() == 0 || static_cast<int>(i) == o.in_place.first) continue;
    EXPECT_EQ(std::memcmp(reads[i], before[i].raw(), before[i].bytes()), 0)
        << "input " << i << " was changed";
  }
  return results;
}

}  // namespace

std::vector<HostTensor> run_node(const Graph& graph, NodeId id, const std::vector<HostTensor>& inputs,
                                 const RunOptions& options) {
  const Node& node = graph.node(id);
  const std::vector<HostTensor> one = run_once(graph, node, inputs, options, 0x00),
                                other = run_once(graph, node, inputs, options, 0xC5);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_TRUE(one[i].bytes() == 0 || std::memcmp(one[i].raw(), other[i].raw(), one[i].bytes()) == 0)
        << "output " << i << " depends on what its memory or the scratch held";
  }
  return one;
}

std::vector<HostTensor> run_text(const std::string& text, const std::vector<HostTensor>& inputs,
                                 const RunOptions& options) {
  const Sample sample = parse_sample(text);
  const NodeId id = sample.graph.order.at(0);
  std::vector<HostTensor> all;
  std::size_t next = 0;
  for (ValueId x : sample.graph.node(id).inputs) {
    if (!x) {
      all.emplace_back();
    } else if (sample.graph.is_constant(x)) {
      all.push_back(*sample.graph.value(x).data);
    } else {
      all.push_back(inputs.at(next++));
    }
  }
  return run_node(sample.graph, id, all, options);
}

HostTensor random_tensor(DType dtype, const Ints& shape, unsigned seed, double low, double high) {
  HostTensor t(dtype, shape);
  std::mt19937_64 random(seed);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;
    // Floats of 24 bits at most, so that f32 and f64 see the same numbers; whole numbers in the range; 0
    // or 1.
    const double x = low + u * (high - low);
    t.set_double(i, is_float(dtype)           ? static_cast<double>(static_cast<float>(x))
                    : dtype == DType::boolean ? (u < 0.5 ? 0 : 1)
                                              : std::floor(x));
  }
  return t;
}

std::vector<HostTensor> random_inputs(const Sample& sample, unsigned seed) {
  std::vector<HostTensor> inputs;
  for (ValueId x : sample.graph.node(sample.graph.order.at(0)).inputs) {
    if (!x) {
      inputs.emplace_back();
      continue;
    }
    const Value& value = sample.graph.value(x);
    if (value.data) {
      inputs.push_back(*value.data);
      continue;
    }
    const auto range = sample.ranges.find(value.name);
    const auto [low, high] =
        range == sample.ranges.end()
            ? std::pair(is_float(value.type.dtype) ? -1.0 : -5.0, is_float(value.type.dtype) ? 1.0 : 6.0)
            : range->second;
    inputs.push_back(
        random_tensor(value.type.dtype, static_shape(value.type.shape), seed++ * 7919 + 1, low, high));
  }
  return inputs;
}

double difference(const HostTensor& a, const HostTensor& b) {
  if (a.shape() != b.shape()) return std::numeric_limits<double>::infinity();
  double most = 0, scale = 1;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double x = a.as_double(i), y = b.as_double(i);
    if (std::isnan(x) != std::isnan(y)) return std::numeric_limits<double>::infinity();
    if (std::isnan(x) || x == y) continue;
    most = std::max(most, std::abs(x - y));
    scale = std::max(scale, std::abs(y));
  }
  return most / scale;
}

std::map<std::string, HostTensor> run_graph(const Graph& graph, std::map<ValueId, HostTensor> values) {
  const auto read = [&](ValueId id) -> HostTensor {
    if (!id) return HostTensor();
    if (const auto it = values.find(id); it != values.end()) return it->second;
    const Value& value = graph.value(id);
    if (value.data) return *value.data;
    CHECK(value.ints.has_value(), "'", value.name, "' is read before it is computed");
    HostTensor t(value.type.dtype, static_shape(value.type.shape));
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.set_double(i, static_cast<double>((*value.ints)[static_cast<std::size_t>(i)].value()));
    return t;
  };
  for (NodeId id : graph.order) {
    const Node& node = graph.node(id);
    std::vector<HostTensor> inputs;
    for (ValueId x : node.inputs) inputs.push_back(read(x));
    const std::vector<HostTensor> results = evaluate_node(graph, id, inputs);
    for (std::size_t i = 0; i < results.size(); ++i) values[node.outputs[i]] = results[i];
  }
  std::map<std::string, HostTensor> outputs;
  for (const Output& output : graph.outputs) outputs[output.name] = read(output.value);
  return outputs;
}

}  // namespace onnxddp::testing

// The kernel table against the CPU's: every op of the registry, every sample, generated from the entries.
#include <algorithm>
#include <set>

#include "executor/cuda/kernel_table.h"
#include "graph/registry.h"
#include "graph/text.h"
#include "tests/cuda/device_case.h"
#include "tests/executor/kernel_case.h"

namespace onnxddp::cuda {
namespace {

/// Ops that the CPU has a kernel for and CUDA has not, with the reason. Shrinks only: an op that has a kernel
/// may not be here.
struct Missing {
  std::string op, reason;
};
const std::vector<Missing> kMissing = {};

bool is_missing(const std::string& op) {
  return std::any_of(kMissing.begin(), kMissing.end(), [&](const Missing& m) { return m.op == op; });
}

TEST(KernelTable, HasWhatTheCpuHas) {
  std::set<std::string> cpu, own;
  for (const auto& [name, kernel] : cpu_kernels().kernels) cpu.insert(name);
  for (const auto& [name, kernel] : cuda_kernels().kernels) {
    own.insert(name);
    EXPECT_EQ(name, kernel.op);
    EXPECT_TRUE(cpu.count(name)) << name << " is not an op that the CPU has";
  }
  for (const std::string& op : cpu)
    EXPECT_NE(own.count(op) != 0, is_missing(op)) << op << ": a kernel, or a line with the reason; not both";
  for (const auto& [op, kernel] : cpu_kernels().kernels)
    for (const DType dtype : kernel.dtypes)
      if (dtype != DType::f64 && !is_missing(op)) {
        EXPECT_NE(cuda_kernels().find(op, dtype), nullptr) << op << " of " << dtype_name(dtype);
      }
  for (const Missing& m : kMissing) EXPECT_TRUE(cpu.count(m.op)) << m.op << " needs no line";
}

TEST(KernelTable, SaysAtOnceWhatItCannotCast) {
  const Graph graph;
  const Node node;
  PlanContext context(graph, node, {{DType::f32, {2}}}, {{DType::u16, {2}}}, 1);
  EXPECT_THROW(cuda_kernels().find("Cast", DType::f32)->prepare(context), Error);
}

struct Options {
  bool nhwc = false;                     // images are at hand in N,H,W,C
  bool captured = false;                 // run is recorded, and the recording runs
  std::pair<int, int> in_place{-1, -1};  // {input, output} that share memory
};

bool is_image(const SlotType& t) { return t.shape.size() == 4; }

/// Layouts as the planner gives them.
void choose_layouts(const Kernel& kernel, PlanContext& c, bool nhwc) {
  for (SlotType& t : c.inputs) t.layout = nhwc && is_image(t) ? Layout::nhwc : Layout::dense;
  if (kernel.rule == LayoutRule::follow) {
    for (SlotType& y : c.outputs)
      for (const SlotType& x : c.inputs)
        if (x.shape == y.shape) y.layout = x.layout;
    for (SlotType& x : c.inputs)
      if (x.shape != c.outputs[0].shape) x.layout = Layout::dense;
    return;
  }
  LayoutChoice choice;
  if (kernel.rule == LayoutRule::choose) choice = kernel.layouts(c);
  choice.inputs.resize(c.inputs.size(), Layout::dense);
  choice.outputs.resize(c.outputs.size(), Layout::dense);
  for (std::size_t i = 0; i < c.inputs.size(); ++i) c.inputs[i].layout = choice.inputs[i];
  for (std::size_t i = 0; i < c.outputs.size(); ++i) c.outputs[i].layout = choice.outputs[i];
}

/// The tensor in the memory order of `to`.
HostTensor reordered(const SlotType& from, const SlotType& to, const HostTensor& tensor) {
  const Graph graph;
  const Node node;
  PlanContext context(graph, node, {from}, {to}, 1);
  HostTensor result(to.dtype, to.shape);
  const void* in = tensor.raw();
  void* out = result.mutable_raw();
  cpu_kernels().find("Reorder", from.dtype)->prepare(context)({&in, &out, nullptr, nullptr});
  return result;
}

DType dtype_of_node(const std::vector<HostTensor>& inputs) {
  for (const HostTensor& t : inputs)
    if (is_float(t.dtype())) return t.dtype();
  return inputs.empty() ? DType::f32 : inputs[0].dtype();
}

/// testing::each_sample, of the ops that have a kernel.
template <class F>
void each_sample(const F& f) {
  testing::each_sample([&](const OpDef& op, const std::string& text) {
    if (cuda_kernels().kernels.count(op.name) > 0) f(op, text);
  });
}

/// A sample: its node, inputs, and what the CPU makes of them.
struct Case {
  explicit Case(const std::string& text, DType dtype = DType::f32)
      : sample(parse_sample(text, dtype)),
        id(sample.graph.order.at(0)),
        inputs(testing::random_inputs(sample, 6)) {}
  const Node& node() const { return sample.graph.node(id); }
  std::vector<HostTensor> on_cpu() const { return testing::run_node(sample.graph, id, inputs); }
  Sample sample;
  NodeId id;
  std::vector<HostTensor> inputs;
};

class Kernels : public DeviceTest {
 protected:
  /// Runs the node on the device; nothing if the table has no kernel of this dtype.
  std::vector<HostTensor> run(const Case& x, const Options& o) {
    const Node& node = x.node();
    const Kernel* kernel = device_->kernels().find(node.op->name, dtype_of_node(x.inputs));
    if (kernel == nullptr) return {};
    std::vector<SlotType> in, out;
    for (const HostTensor& t : x.inputs) in.push_back({t.dtype(), t.shape()});
    for (const ValueId y : node.outputs) {
      const TensorType& type = x.sample.graph.value(y).type;
      out.push_back({type.dtype, static_shape(type.shape)});
    }
    PlanContext c(x.sample.graph, node, std::move(in), std::move(out), 1);
    choose_layouts(*kernel, c, o.nhwc);
    const LaneScope scope(device_->lane());
    return execute(x, c, kernel->prepare(c), o);
  }

 private:
  std::vector<HostTensor> execute(const Case& x, const PlanContext& c, const onnxddp::Run& queue,
                                  const Options& o) {
    std::vector<DeviceMemory> memory;
    std::vector<const void*> reads;
    std::vector<void*> writes;
    for (std::size_t i = 0; i < x.inputs.size(); ++i) {
      const HostTensor& t = x.inputs[i];
      memory.emplace_back(t.bytes());
      const HostTensor stored = reordered({t.dtype(), t.shape()}, c.inputs[i], t);
      device_->upload(memory.back().get(), stored.raw(), stored.bytes());
      reads.push_back(x.node().inputs[i] ? memory.back().get() : nullptr);
    }
    for (std::size_t i = 0; i < c.outputs.size(); ++i) {
      memory.emplace_back(c.outputs[i].bytes());
      writes.push_back(memory.back().get());
    }
    if (o.in_place.first >= 0)
      writes[static_cast<std::size_t>(o.in_place.second)] =
          const_cast<void*>(reads[static_cast<std::size_t>(o.in_place.first)]);
    const DeviceMemory scratch(c.scratch_bytes);
    const RunContext context{reads.data(), writes.data(), scratch.get(), nullptr};
    if (o.captured) {
      const cudaStream_t stream = device_->compute().get();
      WorkGraph::capture(stream, [&] { queue(context); }).launch(stream);
      device_->compute().synchronize();
    } else {
      queue(context);
    }
    std::vector<HostTensor> results;
    for (std::size_t i = 0; i < c.outputs.size(); ++i) {
      HostTensor stored(c.outputs[i].dtype, c.outputs[i].shape);
      device_->download(stored.mutable_raw(), writes[i], stored.bytes());
      results.push_back(reordered(c.outputs[i], {stored.dtype(), stored.shape()}, stored));
    }
    return results;
  }
};
INSTANTIATE_DEVICE_TESTS(Kernels);

void expect_equal(const std::vector<HostTensor>& actual, const std::vector<HostTensor>& expected,
                  double tolerance) {
  ASSERT_EQ(actual.size(), expected.size()) << "there is no kernel for this dtype";
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(testing::difference(actual[i], expected[i]), tolerance) << "output " << i;
}

constexpr double kFloatTolerance = 5e-6, kBf16Tolerance = 1.0 / 64;

TEST_P(Kernels, EqualTheCpus) {
  each_sample([&](const OpDef&, const std::string& text) {
    const Case x(text);
    expect_equal(run(x, {}), x.on_cpu(), kFloatTolerance);
  });
}

/// In N,H,W,C where the kernel takes it, and recorded: run does nothing but queue work on the lane's stream.
TEST_P(Kernels, EqualTheCpusInChannelsLastWhenCaptured) {
  each_sample([&](const OpDef&, const std::string& text) {
    const Case x(text);
    expect_equal(run(x, {.nhwc = true, .captured = true}), x.on_cpu(), kFloatTolerance);
  });
}

/// Where the table has bf16: the CPU computes in f32 from the same rounded numbers.
TEST_P(Kernels, EqualTheCpusInBf16) {
  each_sample([&](const OpDef&, const std::string& text) {
    if (text.find("f32[") == std::string::npos) return;
    const Case narrow(text, DType::bf16);
    const std::vector<HostTensor> results = run(narrow, {});
    if (results.empty()) return;
    Case wide(text);
    for (std::size_t i = 0; i < wide.inputs.size(); ++i) {
      HostTensor& to = wide.inputs[i];
      for (std::int64_t k = 0; k < to.numel(); ++k) to.set_double(k, narrow.inputs[i].as_double(k));
    }
    expect_equal(results, wide.on_cpu(), kBf16Tolerance);
  });
}

/// By its signature: whether the op's operands may have this dtype, which is not a float.
bool may_have(const OpDef& op, DType dtype) {
  const std::vector<Param> inputs = parse_signature(op.signature).inputs;
  return !inputs.empty() && std::all_of(inputs.begin(), inputs.end(), [&](const Param& x) {
    return x.kind == "any" || (x.kind == "number" && dtype != DType::boolean);
  });
}

/// Ops of whole numbers and of booleans: the samples with f32 replaced, to the bit.
TEST_P(Kernels, EqualTheCpusInWholeNumbers) {
  int compared = 0;
  each_sample([&](const OpDef& op, const std::string& text) {
    if (text.find("f32[") == std::string::npos) return;
    for (const DType dtype : {DType::i64, DType::i32, DType::boolean}) {
      if (!may_have(op, dtype) || cpu_kernels().find(op.name, dtype) == nullptr) continue;
      SCOPED_TRACE(dtype_name(dtype));
      const Case x(text, dtype);
      expect_equal(run(x, {}), x.on_cpu(), 0);
      ++compared;
    }
  });
  EXPECT_GT(compared, 100);
}

TEST_P(Kernels, ComputeInPlaceWhereTheOpsSay) {
  each_sample([&](const OpDef& op, const std::string& text) {
    const Case x(text);
    for (const auto& [in, out] : op.traits.in_place) {
      const auto i = static_cast<std::size_t>(in), o = static_cast<std::size_t>(out);
      if (i >= x.node().inputs.size() || !x.node().inputs[i] || o >= x.node().outputs.size()) continue;
      const Graph& graph = x.sample.graph;
      if (graph.value(x.node().inputs[i]).type != graph.value(x.node().outputs[o]).type) continue;
      SCOPED_TRACE(cat("input ", in, " in place of output ", out));
      expect_equal(run(x, {.in_place = {in, out}}), run(x, {}), 0);
    }
  });
}

/// What the CPU refuses when it runs, the device refuses when results are fetched, once.
TEST_P(Kernels, LabelsAndIndicesOutOfRangeAreErrors) {
  for (const auto& [text, found] :
       {std::pair("CrossEntropyLoss(f32[3,5], i64[3]=[0,5,2])", "5 at position 1"),
        {"NllLossGrad(f32[3,5], i64[3]=[0,4,-2], f32[])", "-2 at position 2"},
        {"Gather(f32[4,3], i64[2]=[-5,9])", "-5 at position 0"},
        {"GatherGrad(f32[2,3], i64[2]=[0,4]) {shape=[4,3]}", "4 at position 1"}}) {
    const Case x(text);
    try {
      run(x, {});
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(found), std::string::npos) << error.what();
    }
    run(Case("Gather(f32[4,3], i64[2]=[0,3])"), {});
  }
}

/// Shapes that the entries' samples leave out.
TEST_P(Kernels, EqualTheCpusInCorners) {
  for (const std::string text :
       {"Conv(f32[0,3,5,5], f32[4,3,3,3], f32[4])",
        "ConvWeightGrad(f32[0,4,3,3], f32[0,3,5,5]) {shape=[4,3,3,3]}",
        "Conv(f32[2,4,3,3], f32[8,4,1,1], f32[8])",
        "Relu(f32[0,3])",
        "Add(f32[0,3], f32[3])",
        "ReduceSum(f32[0,3]) {axes=[0]}",
        "ReduceMax(f32[2,3,4,5]) {axes=[1,3], keepdims=0}",
        "ReduceMean(f32[300,40]) {axes=[0]}",
        "SumTo(f32[2,3,4,5]) {shape=[3,1,1]}",
        "CrossEntropyLoss(f32[0,5], i64[0])",
        "CrossEntropyLoss(f32[3,5], i32[3]=[0,-100,4]) {ignore_index=-100}",
        "NllLossGrad(f32[3,5], i32[3]=[0,-100,4], f32[]) {ignore_index=-100}",
        "CountTargets(i32[3]=[0,-100,4]) {ignore_index=-100}",
        "Gather(f32[4,3], i32[2]=[0,-1])",
        "GatherGrad(f32[3,3], i32[3]=[0,-1,0]) {shape=[4,3]}",
        "Gather(f32[4,3], i64[0])",
        "GatherGrad(f32[0,3], i64[0]) {shape=[4,3]}",
        "Softmax(f32[2,3,4,5]) {axis=1}",
        "Softmax(f32[2,3,4,5]) {axis=2}",
        "SgdUpdate(f32[9000], f32[9000], f64[5]=[0.1,2,0.9,0.2,0.01], f32[9000])",
        "AdamUpdate(f32[8193], f32[8193], f64[6]=[0.1,7,0.9,0.99,1e-08,0.01], f32[8193], f32[8193] in (0.1, "
        "1))",
        "SumSquares(f32[3], f32[0], f32[9000])",
        "Transpose(f32[2,3,4,5]) {perm=[0,2,3,1]}",
        "Concat(f32[2,3,4,4], f32[2,1,4,4]) {axis=1}",
        "Expand(f32[2,3,1,1]) {shape=[2,3,4,4]}",
        "Slice(f32[2,6,4,4]) {axes=[1], starts=[5], ends=[0], steps=[-2]}",
        "MatMul(f32[2,3,4], f32[1,4,5])",
        "MatMul(f32[2,3,0], f32[0,5])",
        "MatMul(f32[0,3], f32[3,4])",
        "Gemm(f32[2,0], f32[0,4], f32[4])",
        "BatchStats(f32[4,8,5,5])",
        "BatchStats(f32[0,3])",
        "BatchNormApply(f32[2,3,5,5], f32[3], f32[3], f32[8]=[0.1,-0.2,0.3,5,7,6,0,50])"}) {
    SCOPED_TRACE(text);
    try {
      const Case x(text);
      for (const bool nhwc : {false, true}) expect_equal(run(x, {.nhwc = nhwc}), x.on_cpu(), kFloatTolerance);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

}  // namespace
}  // namespace onnxddp::cuda

// Rates of single kernels on one thread, at the shapes of models/: GFLOP/s for products, GB/s for the rest.
#include <benchmark/benchmark.h>

#include "executor/kernel.h"
#include "graph/op.h"
#include "graph/text.h"

namespace onnxddp {
namespace {

/// One kernel with its buffers, in N,H,W,C where it takes it.
class Case {
 public:
  explicit Case(const std::string& text, bool nhwc = true)
      : sample_(parse_sample(text)), node_(sample_.graph.node(sample_.graph.order[0])) {
    std::vector<SlotType> in, out;
    for (ValueId x : node_.inputs) in.push_back(x ? type(x) : SlotType{DType::f32, {0}, Layout::dense});
    for (ValueId y : node_.outputs) out.push_back(type(y));
    DType dtype = in[0].dtype;
    for (const SlotType& t : in) {
      if (is_float(t.dtype)) {
        dtype = t.dtype;
        break;
      }
    }
    const Kernel* kernel = cpu_kernels().find(node_.op->name, dtype);
    PlanContext context(sample_.graph, node_, in, out, 1);
    if (nhwc) choose(*kernel, context);
    run_ = kernel->prepare(context);
    for (std::size_t i = 0; i < in.size(); ++i) add(reads_, in[i], node_.inputs[i]);
    for (std::size_t i = 0; i < out.size(); ++i) add(writes_, out[i], kNone);
    scratch_ = HostTensor(DType::u8, {static_cast<std::int64_t>(context.scratch_bytes)});
  }
  void run() {
    run_({reads_.data(), const_cast<void* const*>(writes_.data()), scratch_.mutable_raw(), nullptr});
  }
  double bytes() const { return bytes_; }
  double flops() const {
    const Inference i(sample_.graph, *node_.op, node_.inputs, node_.attrs);
    return node_.op->flops ? static_cast<double>(node_.op->flops(i).value()) : 0;
  }

 private:
  SlotType type(ValueId id) const {
    const TensorType& t = sample_.graph.value(id).type;
    return {t.dtype, static_shape(t.shape), Layout::dense};
  }
  static void choose(const Kernel& kernel, PlanContext& c) {
    const auto set = [](std::vector<SlotType>& types, const std::vector<Layout>* layouts) {
      for (std::size_t i = 0; i < types.size(); ++i) {
        if (types[i].shape.size() == 4)
          types[i].layout = layouts ? (i < layouts->size() ? (*layouts)[i] : Layout::dense) : Layout::nhwc;
      }
    };
    if (kernel.rule == LayoutRule::dense) return;
    set(c.inputs, nullptr);
    set(c.outputs, nullptr);
    if (kernel.rule != LayoutRule::choose) return;
    const LayoutChoice choice = kernel.layouts(c);
    set(c.inputs, &choice.inputs);
    set(c.outputs, &choice.outputs);
  }
  template <class Pointers>
  void add(Pointers& pointers, const SlotType& t, ValueId id) {
    HostTensor tensor =
        id && sample_.graph.is_constant(id) ? *sample_.graph.value(id).data : HostTensor(t.dtype, t.shape);
    for (std::int64_t i = 0;
         is_float(t.dtype) && i < tensor.numel() && !(id && sample_.graph.is_constant(id)); ++i)
      tensor.set_double(i, 0.5 + static_cast<double>(i % 17) / 16.0);
    bytes_ += static_cast<double>(tensor.bytes());
    held_.push_back(std::move(tensor));
    pointers.push_back(held_.back().mutable_raw());
  }

  Sample sample_;
  const Node& node_;
  Run run_;
  std::vector<HostTensor> held_;
  std::vector<const void*> reads_;
  std::vector<void*> writes_;
  HostTensor scratch_;
  double bytes_ = 0;
};

void measure(benchmark::State& state, const std::string& text, bool nhwc) {
  Case c(text, nhwc);
  c.run();
  for (auto _ : state) c.run();
  const auto runs = static_cast<double>(state.iterations());
  if (c.flops() > 0)
    state.counters["GFLOP/s"] = benchmark::Counter(c.flops() * runs / 1e9, benchmark::Counter::kIsRate);
  state.counters["GB/s"] = benchmark::Counter(c.bytes() * runs / 1e9, benchmark::Counter::kIsRate);
}

const char* const kCases[] = {
    // resnet20, batch 32
    "Conv(f32[32,3,32,32], f32[16,3,3,3]) {pads=[1,1,1,1]}",
    "Conv(f32[32,16,32,32], f32[16,16,3,3]) {pads=[1,1,1,1]}",
    "Conv(f32[32,16,32,32], f32[32,16,3,3]) {strides=[2,2], pads=[1,1,1,1]}",
    "Conv(f32[32,16,32,32], f32[32,16,1,1]) {strides=[2,2]}",
    "Conv(f32[32,32,16,16], f32[32,32,3,3]) {pads=[1,1,1,1]}",
    "Conv(f32[32,64,8,8], f32[64,64,3,3]) {pads=[1,1,1,1]}",
    "ConvDataGrad(f32[32,16,32,32], f32[16,16,3,3]) {shape=[32,16,32,32], pads=[1,1,1,1]}",
    "ConvDataGrad(f32[32,32,16,16], f32[32,16,3,3]) {shape=[32,16,32,32], strides=[2,2], pads=[1,1,1,1]}",
    "ConvDataGrad(f32[32,32,16,16], f32[32,32,3,3]) {shape=[32,32,16,16], pads=[1,1,1,1]}",
    "ConvDataGrad(f32[32,64,8,8], f32[64,64,3,3]) {shape=[32,64,8,8], pads=[1,1,1,1]}",
    "ConvWeightGrad(f32[32,16,32,32], f32[32,3,32,32]) {shape=[16,3,3,3], pads=[1,1,1,1]}",
    "ConvWeightGrad(f32[32,16,32,32], f32[32,16,32,32]) {shape=[16,16,3,3], pads=[1,1,1,1]}",
    "ConvWeightGrad(f32[32,32,16,16], f32[32,16,32,32]) {shape=[32,16,3,3], strides=[2,2], pads=[1,1,1,1]}",
    "ConvWeightGrad(f32[32,32,16,16], f32[32,32,16,16]) {shape=[32,32,3,3], pads=[1,1,1,1]}",
    "ConvWeightGrad(f32[32,64,8,8], f32[32,64,8,8]) {shape=[64,64,3,3], pads=[1,1,1,1]}",
    "BatchStats(f32[32,16,32,32])",
    "BatchNormApply(f32[32,16,32,32], f32[16], f32[16], f32[34])",
    "BatchNormGradSums(f32[32,16,32,32], f32[32,16,32,32], f32[34])",
    "BatchNormGradApply(f32[32,16,32,32], f32[32,16,32,32], f32[16], f32[34], f32[16], f32[16])",
    "Relu(f32[32,16,32,32])",
    "Step(f32[32,16,32,32])",
    "Add(f32[32,16,32,32], f32[32,16,32,32])",
    "ReduceMean(f32[32,64,8,8]) {axes=[2,3]}",
    "MaxPool(f32[32,16,32,32]) {kernel_shape=[2,2], strides=[2,2]}",
    "MaxPoolGrad(f32[32,16,16,16], f32[32,16,32,32]) {kernel_shape=[2,2], strides=[2,2]}",
    // mlp, batch 64
    "Gemm(f32[64,784], f32[512,784], f32[512]) {transB=1}",
    "Gemm(f32[64,512], f32[512,784])",
    "Gemm(f32[64,512], f32[64,784]) {transA=1}",
    "Gemm(f32[64,512], f32[512,512], f32[512]) {transB=1}",
    "Gemm(f32[64,512], f32[512,512])",
    "Gemm(f32[64,512], f32[64,512]) {transA=1}",
    "Gemm(f32[64,512], f32[10,512], f32[10]) {transB=1}",
    "Gemm(f32[64,10], f32[10,512])",
    "Gemm(f32[64,10], f32[64,512]) {transA=1}",
    "BatchStats(f32[64,512])",
    "SumTo(f32[64,512]) {shape=[512]}",
    "SumSquares(f32[512,784])",
    "AdamUpdate(f32[512,784], f32[512,784], f64[6]=[0.1,1,0.9,0.999,1e-8,0], f32[512,784], f32[512,784])",
    "SgdUpdate(f32[512,784], f32[512,784], f64[5]=[0.1,2,0.9,0,0.0001], f32[512,784])",
    "CrossEntropyLossGrad(f32[64,10], i64[64], f32[])",
    // functions
    "Exp(f32[100000])",
    "Tanh(f32[100000])",
    "Sigmoid(f32[100000])",
    "Erf(f32[100000])",
    "Log(f32[100000])",
    "Softmax(f32[1024,128]) {axis=1}",
    "Dropout(f32[1000,100], i64[5]=[7,3,0,0,1]) {ratio=0.5, key=11, batch=1}",
    "Transpose(f32[512,784]) {perm=[1,0]}",
    // products around the size from which oneDNN is asked
    "Gemm(f32[2,1], f32[1,1], f32[1]) {transB=1}",
    "Gemm(f32[8,8], f32[8,8])",
    "Gemm(f32[16,16], f32[16,15])",
    "Gemm(f32[16,16], f32[16,17])",
    "Gemm(f32[32,64], f32[10,64], f32[10]) {transB=1}",
    "MatMul(f32[8,4,16,16], f32[8,4,16,16])",
};

const bool kRegistered = [] {
  for (const char* text : kCases)
    benchmark::RegisterBenchmark(text, [text](benchmark::State& state) { measure(state, text, true); });
  return true;
}();

}  // namespace
}  // namespace onnxddp

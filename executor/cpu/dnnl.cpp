// oneDNN: convolution and matrix products of f32. Primitives are made in prepare; run sets the pointers and
// executes.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>

#include "executor/cpu/kernels.h"

namespace onnxddp::cpu {
namespace {

using dnnl::memory;

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

/// oneDNN takes its number of threads from the calling thread's OpenMP setting, when a primitive is made and
/// when it runs.
void use_threads(int threads) {
  if (omp_get_max_threads() != threads) omp_set_num_threads(threads);
}

/// The one place where oneDNN's statuses become exceptions.
void check(dnnl_status_t status) {
  if (status != dnnl_success)
    throw InternalError(cat("oneDNN: a primitive failed with status ", static_cast<int>(status)));
}

/// Runs `make`, which creates primitives; false where oneDNN has no implementation.
template <class F>
bool supported(const F& make) {
  try {
    return make();
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_unimplemented || error.status == dnnl_invalid_arguments) return false;
    throw InternalError(cat("oneDNN: ", error.what()));
  }
}

/// A primitive with its arguments. (The C call takes an array that is kept; the C++ call would build one each
/// time.)
class Step {
 public:
  Step() = default;
  Step(const dnnl::primitive& primitive, const std::vector<std::pair<int, memory::desc>>& operands)
      : primitive_(primitive) {
    for (const auto& [arg, desc] : operands) {
      memories_.emplace_back(desc, engine(), nullptr);
      args_.push_back({arg, memories_.back().get()});
    }
  }
  explicit operator bool() const { return static_cast<bool>(primitive_); }
  /// Memory of operand i.
  void set(std::size_t i, const void* data) const {
    check(dnnl_memory_set_data_handle(args_[i].memory, const_cast<void*>(data)));
  }
  void execute(const dnnl::stream& stream) const {
    check(
        dnnl_primitive_execute(primitive_.get(), stream.get(), static_cast<int>(args_.size()), args_.data()));
  }

 private:
  dnnl::primitive primitive_{};
  std::vector<memory> memories_;
  std::vector<dnnl_exec_arg_t> args_;
};

/// Scratch: the packed weight, then oneDNN's own.
struct Scratch {
  std::size_t packed = 0;
  void* own(void* scratch) const { return static_cast<char*>(scratch) + packed; }
};

memory::desc desc_of(const SlotType& type) { return {type.shape, memory::data_type::f32, type.strides()}; }

dnnl::primitive_attr attributes() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

dnnl::reorder::primitive_desc make_reorder(const memory::desc& from, const memory::desc& to) {
  return {engine(), from, engine(), to, attributes()};
}

// ---- convolution

/// Parameters in oneDNN's terms: weights have a group axis when there are groups, dilation counts from 0.
struct ConvParams {
  memory::dims strides, dilations, begin, end, weight_dims;
  memory::desc weight, packed;  // ONNX order; oneDNN's choice
};

ConvParams params_of(const PlanContext& c, const SlotType& weight) {
  const Ints pads = c.integers("pads");
  ConvParams p{c.integers("strides"),
               c.integers("dilations"),
               {pads[0], pads[1]},
               {pads[2], pads[3]},
               weight.shape,
               {},
               {}};
  for (std::int64_t& d : p.dilations) --d;
  if (const std::int64_t group = c.integer("group"); group != 1) {
    p.weight_dims[0] /= group;
    p.weight_dims.insert(p.weight_dims.begin(), group);
  }
  memory::dims strides(p.weight_dims.size(), 1);
  for (std::size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * p.weight_dims[d];
  p.weight = memory::desc(p.weight_dims, memory::data_type::f32, strides);
  p.packed = memory::desc(p.weight_dims, memory::data_type::f32, memory::format_tag::any);
  return p;
}

dnnl::convolution_forward::primitive_desc forward_desc(const ConvParams& p, const SlotType& x,
                                                       const SlotType& y, const SlotType* bias) {
  const auto kind = dnnl::prop_kind::forward_training;
  const auto direct = dnnl::algorithm::convolution_direct;
  if (bias) {
    return {engine(),    kind,    direct, desc_of(x),   p.packed, desc_of(*bias), desc_of(y), p.strides,
            p.dilations, p.begin, p.end,  attributes(), true};
  }
  return {engine(),  kind,        direct,  desc_of(x), p.packed,     desc_of(y),
          p.strides, p.dilations, p.begin, p.end,      attributes(), true};
}

/// One convolution primitive and the reorder of its weight (none where oneDNN takes ONNX's order).
struct ConvRun {
  Step reorder, conv;
  Scratch scratch;
  dnnl::stream stream{engine()};
  int threads = 1;
};

/// Sets scratch sizes; returns the reorder between ONNX's order and the packed one.
Step pack_step(PlanContext& c, ConvRun& run, const memory::desc& from, const memory::desc& to,
               const memory::desc& scratchpad) {
  std::size_t own = scratchpad.get_size();
  Step step;
  if (from != to) {
    const auto pd = make_reorder(from, to);
    run.scratch.packed = padded(std::max(from.get_size(), to.get_size()));
    own = std::max(own, pd.scratchpad_desc().get_size());
    step = Step(dnnl::reorder(pd),
                {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}, {DNNL_ARG_SCRATCHPAD, pd.scratchpad_desc()}});
  }
  c.scratch_bytes = run.scratch.packed + padded(own);
  return step;
}

/// Reorders the weight, if needed, into the scratch; returns where the packed weight lies.
const void* pack(const ConvRun& run, const RunContext& r, const void* weight) {
  if (!run.reorder) return weight;
  run.reorder.set(0, weight);
  run.reorder.set(1, r.scratch);
  run.reorder.set(2, run.scratch.own(r.scratch));
  run.reorder.execute(run.stream);
  return r.scratch;
}

}  // namespace

Run dnnl_conv(PlanContext& c) {
  use_threads(c.threads);
  const ConvParams p = params_of(c, c.inputs[1]);
  const SlotType* bias = c.has(2) ? &c.inputs[2] : nullptr;
  auto run = std::make_shared<ConvRun>();
  run->threads = c.threads;
  const bool made = supported([&] {
    const auto pd = forward_desc(p, c.inputs[0], c.outputs[0], bias);
    if (!pd) return false;
    run->reorder = pack_step(c, *run, p.weight, pd.weights_desc(), pd.scratchpad_desc());
    std::vector<std::pair<int, memory::desc>> operands = {{DNNL_ARG_SRC, pd.src_desc()},
                                                          {DNNL_ARG_WEIGHTS, pd.weights_desc()},
                                                          {DNNL_ARG_DST, pd.dst_desc()},
                                                          {DNNL_ARG_SCRATCHPAD, pd.scratchpad_desc()}};
    if (bias) operands.emplace_back(DNNL_ARG_BIAS, pd.bias_desc());
    run->conv = Step(dnnl::convolution_forward(pd), operands);
    return true;
  });
  if (!made) return nullptr;
  return [run, bias = bias != nullptr](const RunContext& r) {
    use_threads(run->threads);
    run->conv.set(1, pack(*run, r, r.inputs[1]));
    run->conv.set(0, r.inputs[0]);
    run->conv.set(2, r.outputs[0]);
    run->conv.set(3, run->scratch.own(r.scratch));
    if (bias) run->conv.set(4, r.inputs[2]);
    run->conv.execute(run->stream);
  };
}

Run dnnl_conv_data_grad(PlanContext& c) {
  use_threads(c.threads);
  const SlotType &dy = c.inputs[0], &dx = c.outputs[0];
  const ConvParams p = params_of(c, c.inputs[1]);
  auto run = std::make_shared<ConvRun>();
  run->threads = c.threads;
  const bool made = supported([&] {
    const auto hint = forward_desc(p, dx, dy, nullptr);
    if (!hint) return false;
    const dnnl::convolution_backward_data::primitive_desc pd(
        engine(), dnnl::algorithm::convolution_direct, desc_of(dx), p.packed, desc_of(dy), p.strides,
        p.dilations, p.begin, p.end, hint, attributes(), true);
    if (!pd) return false;
    run->reorder = pack_step(c, *run, p.weight, pd.weights_desc(), pd.scratchpad_desc());
    run->conv = Step(dnnl::convolution_backward_data(pd), {{DNNL_ARG_DIFF_DST, pd.diff_dst_desc()},
                                                           {DNNL_ARG_WEIGHTS, pd.weights_desc()},
                                                           {DNNL_ARG_DIFF_SRC, pd.diff_src_desc()},
                                                           {DNNL_ARG_SCRATCHPAD, pd.scratchpad_desc()}});
    return true;
  });
  if (!made) return nullptr;
  return [run](const RunContext& r) {
    use_threads(run->threads);
    run->conv.set(1, pack(*run, r, r.inputs[1]));
    run->conv.set(0, r.inputs[0]);
    run->conv.set(2, r.outputs[0]);
    run->conv.set(3, run->scratch.own(r.scratch));
    run->conv.execute(run->stream);
  };
}

Run dnnl_conv_weight_grad(PlanContext& c) {
  use_threads(c.threads);
  const SlotType &dy = c.inputs[0], &x = c.inputs[1];
  const ConvParams p = params_of(c, c.outputs[0]);
  auto run = std::make_shared<ConvRun>();
  run->threads = c.threads;
  const bool made = supported([&] {
    const auto hint = forward_desc(p, x, dy, nullptr);
    if (!hint) return false;
    const dnnl::convolution_backward_weights::primitive_desc pd(
        engine(), dnnl::algorithm::convolution_direct, desc_of(x), p.packed, desc_of(dy), p.strides,
        p.dilations, p.begin, p.end, hint, attributes(), true);
    if (!pd) return false;
    run->reorder = pack_step(c, *run, pd.diff_weights_desc(), p.weight, pd.scratchpad_desc());
    run->conv = Step(dnnl::convolution_backward_weights(pd), {{DNNL_ARG_DIFF_DST, pd.diff_dst_desc()},
                                                              {DNNL_ARG_SRC, pd.src_desc()},
                                                              {DNNL_ARG_DIFF_WEIGHTS, pd.diff_weights_desc()},
                                                              {DNNL_ARG_SCRATCHPAD, pd.scratchpad_desc()}});
    return true;
  });
  if (!made) return nullptr;
  return [run](const RunContext& r) {
    use_threads(run->threads);
    run->conv.set(0, r.inputs[0]);
    run->conv.set(1, r.inputs[1]);
    run->conv.set(2, run->reorder ? r.scratch : r.outputs[0]);
    run->conv.set(3, run->scratch.own(r.scratch));
    run->conv.execute(run->stream);
    if (!run->reorder) return;
    run->reorder.set(0, r.scratch);
    run->reorder.set(1, r.outputs[0]);
    run->reorder.set(2, run->scratch.own(r.scratch));
    run->reorder.execute(run->stream);
  };
}

// ---- matrix products

namespace {

Run matmul_run(PlanContext& c, const memory::desc& a, const memory::desc& b, const memory::desc& y,
               const memory::desc* bias) {
  use_threads(c.threads);
  Step step;
  const bool made = supported([&] {
    const auto pd = bias ? dnnl::matmul::primitive_desc(engine(), a, b, *bias, y, attributes(), true)
                         : dnnl::matmul::primitive_desc(engine(), a, b, y, attributes(), true);
    if (!pd) return false;
    std::vector<std::pair<int, memory::desc>> operands = {{DNNL_ARG_SRC, a},
                                                          {DNNL_ARG_WEIGHTS, b},
                                                          {DNNL_ARG_DST, y},
                                                          {DNNL_ARG_SCRATCHPAD, pd.scratchpad_desc()}};
    if (bias) operands.emplace_back(DNNL_ARG_BIAS, *bias);
    step = Step(dnnl::matmul(pd), operands);
    c.scratch_bytes = pd.scratchpad_desc().get_size();
    return true;
  });
  if (!made) return nullptr;
  return [step, stream = dnnl::stream(engine()), threads = c.threads,
          bias = bias != nullptr](const RunContext& r) {
    use_threads(threads);
    step.set(0, r.inputs[0]);
    step.set(1, r.inputs[1]);
    step.set(2, r.outputs[0]);
    step.set(3, r.scratch);
    if (bias) step.set(4, r.inputs[2]);
    step.execute(stream);
  };
}

memory::desc matrix(std::int64_t rows, std::int64_t cols, bool transposed) {
  return {{rows, cols}, memory::data_type::f32, transposed ? memory::dims{1, rows} : memory::dims{cols, 1}};
}

/// The tensor with axes of 1 in front up to `rank`.
memory::desc with_rank(const SlotType& t, std::size_t rank) {
  memory::dims dims(rank - t.shape.size(), 1), strides(rank - t.shape.size(), t.numel());
  const Ints own = t.strides();
  dims.insert(dims.end(), t.shape.begin(), t.shape.end());
  strides.insert(strides.end(), own.begin(), own.end());
  return {dims, memory::data_type::f32, strides};
}

}  // namespace

Run dnnl_matmul(PlanContext& c) {
  const SlotType &a = c.inputs[0], &b = c.inputs[1], &y = c.outputs[0];
  if (b.shape.size() == 2) {  // one product of all of a's rows
    const std::int64_t k = a.shape.back(), n = b.shape[1], m = a.numel() / k;
    return matmul_run(c, matrix(m, k, false), matrix(k, n, false), matrix(m, n, false), nullptr);
  }
  const std::size_t rank = y.shape.size();
  return matmul_run(c, with_rank(a, rank), with_rank(b, rank), desc_of(y), nullptr);
}

Run dnnl_gemm(PlanContext& c, bool bias) {
  const Ints& y = c.outputs[0].shape;
  const bool ta = c.flag("transA"), tb = c.flag("transB");
  const std::int64_t m = y[0], n = y[1], k = c.inputs[0].shape[ta ? 0 : 1];
  const memory::desc row = matrix(1, n, false);
  return matmul_run(c, matrix(m, k, ta), matrix(k, n, tb), matrix(m, n, false), bias ? &row : nullptr);
}

}  // namespace onnxddp::cpu

// Softmax, losses, batch norm, pools, dropout.
#include "executor/cuda/table_parts.h"

namespace onnxddp::cuda {
namespace {

/// The rows along the node's axis.
Rows rows_of(const PlanContext& c) {
  const SlotType& x = c.inputs[0];
  // NHWC comes with the channels' axis only: those of a pixel are a row.
  if (x.layout == Layout::nhwc) {
    CHECK(normal_axis(c.integer("axis"), 4) == 1, "softmax over another axis than the channels of NHWC");
    return {x.numel() / std::max<std::int64_t>(x.shape[1], 1), x.shape[1], 1};
  }
  const Split s = split_at(x.shape, c.integer("axis"));
  return {s.outer * s.inner, s.size, s.inner};
}

using Softmax = void (*)(DType, const Rows&, const void* x, void* y, cudaStream_t);
std::function<Run(PlanContext&)> softmax_by(Softmax kernel) {
  return [kernel](PlanContext& c) -> Run {
    return [=, rows = rows_of(c), dtype = c.inputs[0].dtype](const RunContext& r) {
      kernel(dtype, rows, r.inputs[0], r.outputs[0], stream());
    };
  };
}

/// Labels as the node describes them; data and fault come at run.
Labels labels_of(const PlanContext& c) {
  Labels labels;
  labels.wide = c.inputs[1].dtype == DType::i64;
  labels.ignore = c.integer("ignore_index");
  return labels;
}
Labels bound(Labels labels, const RunContext& r) {
  labels.data = r.inputs[1];
  labels.fault = current_lane().fault;
  return labels;
}

Run loss(PlanContext& c, bool logits) {
  const Rows rows = rows_of(c);
  c.scratch_bytes = loss_scratch_bytes(rows);
  return [=, labels = labels_of(c), dtype = c.inputs[0].dtype](const RunContext& r) {
    classification_loss(dtype, rows, logits, r.inputs[0], bound(labels, r), r.outputs[0], r.scratch,
                        stream());
  };
}

Run loss_grad(PlanContext& c, bool logits) {
  return [=, rows = rows_of(c), labels = labels_of(c), dtype = c.inputs[0].dtype](const RunContext& r) {
    classification_loss_grad(dtype, rows, logits, logits ? r.inputs[0] : nullptr, bound(labels, r),
                             r.inputs[2], r.outputs[0], stream());
  };
}

}  // namespace

void add_losses(KernelTable& table) {
  add(table, "Softmax", kFloats, softmax_by(softmax));
  add(table, "LogSoftmax", kFloats, softmax_by(log_softmax));
  add(table, "CrossEntropyLoss", kFloats, [](PlanContext& c) { return loss(c, true); });
  add(table, "CrossEntropyLossGrad", kFloats, [](PlanContext& c) { return loss_grad(c, true); });
  add(table, "NllLoss", kFloats, [](PlanContext& c) { return loss(c, false); });
  add(table, "NllLossGrad", kFloats, [](PlanContext& c) { return loss_grad(c, false); });
}

namespace {

Run statistics(PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  c.scratch_bytes = norm_scratch_bytes(v);
  return [=](const RunContext& r) {
    batch_stats(DType::f32, v, r.inputs[0], r.out<float>(0), r.scratch, stream());
  };
}

Run fixed(PlanContext& c) {
  return [n = c.inputs[0].numel()](const RunContext& r) {
    fixed_stats(r.in<float>(0), r.in<float>(1), r.out<float>(0), n, stream());
  };
}

Run merge(PlanContext& c) {
  const std::int64_t ranks = c.inputs[0].shape[0], channels = (c.inputs[0].shape[1] - 2) / 2;
  return
      [=](const RunContext& r) { merge_stats(r.in<float>(0), r.out<float>(0), ranks, channels, stream()); };
}

Run apply(PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  c.scratch_bytes = norm_scratch_bytes(v);
  return [=, epsilon = c.number("epsilon")](const RunContext& r) {
    batch_norm_apply(DType::f32, v, r.inputs[0], r.in<float>(1), r.in<float>(2), r.in<float>(3), epsilon,
                     nullptr, false, r.outputs[0], r.scratch, stream());
  };
}

Run running(PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel();
  const bool unbiased = c.flag("unbiased"), mean = c.has_output(0), var = c.has_output(1);
  return [=, momentum = c.number("momentum")](const RunContext& r) {
    running_stats(r.in<float>(0), r.in<float>(1), r.in<float>(2), momentum, unbiased,
                  mean ? r.out<float>(0) : nullptr, var ? r.out<float>(1) : nullptr, n, stream());
  };
}

Run gradient_sums(PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  c.scratch_bytes = norm_scratch_bytes(v);
  const bool bias = c.has_output(0), scale = c.has_output(1);
  return [=, epsilon = c.number("epsilon")](const RunContext& r) {
    batch_norm_grad_sums(DType::f32, v, r.inputs[0], r.inputs[1], r.in<float>(2), epsilon,
                         bias ? r.out<float>(0) : nullptr, scale ? r.out<float>(1) : nullptr, r.scratch,
                         stream());
  };
}

Run gradient(PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  c.scratch_bytes = norm_scratch_bytes(v);
  const bool sums = c.has(4) && c.has(5);
  return [=, epsilon = c.number("epsilon")](const RunContext& r) {
    batch_norm_grad_apply(DType::f32, v, r.inputs[0], r.inputs[1], r.in<float>(2), r.in<float>(3), epsilon,
                          sums ? r.in<float>(4) : nullptr, sums ? r.in<float>(5) : nullptr, r.outputs[0],
                          r.scratch, stream());
  };
}

}  // namespace

/// f32 only: the statistics of an op have its dtype, those of the kernels are always float.
void add_norms(KernelTable& table) {
  add(table, "BatchStats", kFloat, statistics);
  add(table, "FixedStats", kFloat, fixed);
  add(table, "MergeStats", kFloat, merge);
  add(table, "BatchNormApply", kFloat, apply);
  add(table, "RunningStats", kFloat, running);
  add(table, "BatchNormGradSums", kFloat, gradient_sums);
  add(table, "BatchNormGradApply", kFloat, gradient);
}

namespace {

Pool pool_of(const PlanContext& c, const SlotType& image, const SlotType& pooled) {
  CHECK(image.shape.size() == 4 && pooled.shape.size() == 4, "pooling is two-dimensional");
  CHECK(image.layout == pooled.layout, "pooling from one layout to another");
  const Ints kernel = c.integers("kernel_shape"), strides = c.integers("strides"), pads = c.integers("pads"),
             dilations = c.integers("dilations");
  const auto narrow = [](std::int64_t n) {
    CHECK(n >= 0 && n <= INT32_MAX, "a pooling window of ", n);
    return static_cast<int>(n);
  };
  Pool p;
  p.n = image.shape[0], p.c = image.shape[1], p.h = image.shape[2], p.w = image.shape[3];
  p.oh = pooled.shape[2], p.ow = pooled.shape[3];
  p.kh = narrow(kernel[0]), p.kw = narrow(kernel[1]);
  p.sh = narrow(strides[0]), p.sw = narrow(strides[1]);
  p.dh = narrow(dilations[0]), p.dw = narrow(dilations[1]);
  p.ph = narrow(pads[0]), p.pw = narrow(pads[1]), p.ph_end = narrow(pads[2]), p.pw_end = narrow(pads[3]);
  p.nhwc = image.layout == Layout::nhwc;
  return p;
}

Run max_of_windows(PlanContext& c) {
  return [p = pool_of(c, c.inputs[0], c.outputs[0]), dtype = c.inputs[0].dtype](const RunContext& r) {
    max_pool(dtype, p, r.inputs[0], r.outputs[0], stream());
  };
}
Run max_of_windows_grad(PlanContext& c) {
  return [p = pool_of(c, c.inputs[1], c.inputs[0]), dtype = c.inputs[0].dtype](const RunContext& r) {
    max_pool_grad(dtype, p, r.inputs[0], r.inputs[1], r.outputs[0], stream());
  };
}
Run mean_of_windows(PlanContext& c) {
  Pool p = pool_of(c, c.inputs[0], c.outputs[0]);
  p.count_pads = c.flag("count_include_pad");
  return [p, dtype = c.inputs[0].dtype](const RunContext& r) {
    average_pool(dtype, p, r.inputs[0], r.outputs[0], stream());
  };
}
Run mean_of_windows_grad(PlanContext& c) {
  Pool p = pool_of(c, c.outputs[0], c.inputs[0]);
  p.count_pads = c.flag("count_include_pad");
  return [p, dtype = c.inputs[0].dtype](const RunContext& r) {
    average_pool_grad(dtype, p, r.inputs[0], r.outputs[0], stream());
  };
}

}  // namespace

void add_pools(KernelTable& table) {
  add(table, "MaxPool", kFloats, max_of_windows);
  add(table, "MaxPoolGrad", kFloats, max_of_windows_grad);
  add(table, "AveragePool", kFloats, mean_of_windows);
  add(table, "AveragePoolGrad", kFloats, mean_of_windows_grad);
}

}  // namespace onnxddp::cuda

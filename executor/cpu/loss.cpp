// Softmax, log-softmax, the classification losses and their gradients.
#include <atomic>
#include <cmath>

#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"
#include "executor/scalar_ops.h"

namespace onnxddp::cpu {
namespace {

/// A tensor as rows along one axis. Row r begins at (r / inner) * (n * inner) + r % inner in a dense tensor.
struct Rows {
  std::int64_t count, n, stride;
  std::int64_t inner;
  std::int64_t start(std::int64_t row) const { return row / inner * n * inner + row % inner; }
};

Rows rows_of(const PlanContext& c) {
  const SlotType& x = c.inputs[0];
  const auto axis = static_cast<std::size_t>(normal_axis(c.integer("axis"), x.shape.size()));
  // NHWC and axis 1: the channels of a pixel are a contiguous row.
  if (x.layout == Layout::nhwc && axis == 1)
    return {x.numel() / std::max<std::int64_t>(x.shape[1], 1), x.shape[1], 1, 1};
  CHECK(x.layout == Layout::dense, "softmax over axis ", axis, " of NHWC");
  const Split s = split_at(x.shape, c.integer("axis"));
  return {s.outer * s.inner, s.size, s.inner, s.inner};
}

template <class T>
T max_of(const T* x, std::int64_t n, std::int64_t s) {
  T most = -std::numeric_limits<T>::infinity();
  if (s == 1) {
#pragma omp simd reduction(max : most)
    for (std::int64_t i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
  } else {
    for (std::int64_t i = 0; i < n; ++i) most = std::max(most, x[i * s]);
  }
  return most;
}

/// y[i] = exp(x[i] - most), its sum. (Blocks keep the vector loop of exp apart from the sum in double.)
template <class T>
double exp_sum(const T* x, T* y, std::int64_t n, std::int64_t s, T most) {
  if (s != 1) {
    double total = 0;
    for (std::int64_t i = 0; i < n; ++i)
      total += static_cast<double>(y[i * s] = scalar::exp(x[i * s] - most));
    return total;
  }
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = scalar::exp(x[i] - most);
  return sum_contiguous(y, n);
}
template <class T>
double exp_sum(const T* x, std::int64_t n, std::int64_t s, T most) {
  constexpr std::int64_t kBlock = 128;
  T part[kBlock];
  double total = 0;
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t m = std::min(kBlock, n - i);
    for (std::int64_t j = 0; j < m; ++j) part[j] = x[(i + j) * s];
    total += exp_sum(part, part, m, 1, most);
  }
  return total;
}

template <class T>
Run softmax(const PlanContext& c) {
  const Rows rows = rows_of(c);
  const int threads = c.threads;
  return [=](const RunContext& r) {
    parallel_for(threads, rows.count, grain_of(rows.n * 8), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* x = r.in<T>(0) + rows.start(row);
        T* y = r.out<T>(0) + rows.start(row);
        const double total = exp_sum(x, y, rows.n, rows.stride, max_of(x, rows.n, rows.stride));
        const T scale = static_cast<T>(1.0 / total);
        for (std::int64_t i = 0; i < rows.n; ++i) y[i * rows.stride] *= scale;
      }
    });
  };
}

template <class T>
double log_sum_exp(const T* x, const Rows& rows) {
  const T most = max_of(x, rows.n, rows.stride);
  return static_cast<double>(most) + std::log(exp_sum(x, rows.n, rows.stride, most));
}

template <class T>
Run log_softmax(const PlanContext& c) {
  const Rows rows = rows_of(c);
  const int threads = c.threads;
  return [=](const RunContext& r) {
    parallel_for(threads, rows.count, grain_of(rows.n * 8), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* x = r.in<T>(0) + rows.start(row);
        T* y = r.out<T>(0) + rows.start(row);
        const T most = max_of(x, rows.n, rows.stride);
        const T log_total = static_cast<T>(std::log(exp_sum(x, rows.n, rows.stride, most)));
        for (std::int64_t i = 0; i < rows.n; ++i)
          y[i * rows.stride] = (x[i * rows.stride] - most) - log_total;
      }
    });
  };
}

[[noreturn]] void bad_label(std::int64_t row, std::int64_t label, std::int64_t classes) {
  throw Error(
      cat("label ", label, " in row ", row, " of the targets is not one of the ", classes, " classes"))
      .hint(cat("labels count from 0 to ", classes - 1,
                "; the option ignore_index of the loss names a label to leave out"));
}

/// A targets tensor of i64 or i32, and which labels count.
class Labels {
 public:
  Labels(const PlanContext& c, std::int64_t classes)
      : wide_(c.inputs[1].dtype == DType::i64), ignore_(c.integer("ignore_index")), classes_(classes) {}
  /// The label of a row, or -1 if it is ignored.
  std::int64_t at(const RunContext& r, std::int64_t row) const {
    const std::int64_t label = wide_ ? r.in<std::int64_t>(1)[row] : r.in<std::int32_t>(1)[row];
    return label == ignore_ ? -1 : label;
  }
  /// Throws for the first label that is out of range.
  void check(const RunContext& r, std::int64_t rows) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t label = wide_ ? r.in<std::int64_t>(1)[row] : r.in<std::int32_t>(1)[row];
      if (label != ignore_ && (label < 0 || label >= classes_)) bad_label(row, label, classes_);
    }
  }

 private:
  bool wide_;
  std::int64_t ignore_, classes_;
};

/// Sum over rows of -log p[label]; `logits`: x are logits, else log-probabilities.
template <class T>
Run classification_loss(PlanContext& c, bool logits) {
  const Rows rows = rows_of(c);
  const Labels labels(c, rows.n);
  const int threads = c.threads;
  c.scratch_bytes = static_cast<std::size_t>(rows.count) * sizeof(double);
  return [=](const RunContext& r) {
    labels.check(r, rows.count);
    double* losses = static_cast<double*>(r.scratch);
    parallel_for(threads, rows.count, grain_of(logits ? rows.n * 8 : 8),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t row = begin; row < end; ++row) {
                     const T* x = r.in<T>(0) + rows.start(row);
                     const std::int64_t label = labels.at(r, row);
                     losses[row] = label < 0 ? 0.0
                                             : (logits ? log_sum_exp(x, rows) : 0.0) -
                                                   static_cast<double>(x[label * rows.stride]);
                   }
                 });
    *r.out<T>(0) = static_cast<T>(sum_contiguous(losses, rows.count));
  };
}

template <class T>
Run cross_entropy_grad(PlanContext& c) {
  const Rows rows = rows_of(c);
  const Labels labels(c, rows.n);
  const int threads = c.threads;
  return [=](const RunContext& r) {
    labels.check(r, rows.count);
    const T dy = *r.in<T>(2);
    parallel_for(threads, rows.count, grain_of(rows.n * 8), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* x = r.in<T>(0) + rows.start(row);
        T* dx = r.out<T>(0) + rows.start(row);
        const std::int64_t label = labels.at(r, row), s = rows.stride;
        if (label < 0) {
          for (std::int64_t i = 0; i < rows.n; ++i) dx[i * s] = T(0);
          continue;
        }
        const double total = exp_sum(x, dx, rows.n, s, max_of(x, rows.n, s));
        const T scale = static_cast<T>(1.0 / total);
        for (std::int64_t i = 0; i < rows.n; ++i)
          dx[i * s] = dy * (dx[i * s] * scale - (i == label ? T(1) : T(0)));
      }
    });
  };
}

template <class T>
Run nll_grad(PlanContext& c) {
  const Rows rows = rows_of(c);
  const Labels labels(c, rows.n);
  const std::int64_t n = c.outputs[0].numel();
  return [=](const RunContext& r) {
    labels.check(r, rows.count);
    T* dx = r.out<T>(0);
    std::fill(dx, dx + n, T(0));
    const T dy = *r.in<T>(2);
    for (std::int64_t row = 0; row < rows.count; ++row) {
      const std::int64_t label = labels.at(r, row);
      if (label >= 0) dx[rows.start(row) + label * rows.stride] = -dy;
    }
  };
}

/// NHWC where it comes so and the axis is the channels'.
LayoutChoice channels_of_pixels(const PlanContext& c) {
  const bool keep = c.inputs[0].shape.size() == 4 && normal_axis(c.integer("axis"), 4) == 1;
  const Layout layout = keep ? c.inputs[0].layout : Layout::dense;
  return {{layout}, {layout}};
}

}  // namespace

void add_losses(KernelTable& table) {
#define ONNXDDP_FLOAT(CALL)                                         \
  [](PlanContext& c) {                                              \
    return with_float(c.inputs[0].dtype, [&](auto element) -> Run { \
      using T = decltype(element);                                  \
      return CALL;                                                  \
    });                                                             \
  }
  add(table, {"Softmax", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(softmax<T>(c)), channels_of_pixels});
  add(table,
      {"LogSoftmax", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(log_softmax<T>(c)), channels_of_pixels});
  add(table,
      {"CrossEntropyLoss", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(classification_loss<T>(c, true))});
  add(table, {"CrossEntropyLossGrad", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(cross_entropy_grad<T>(c))});
  add(table, {"NllLoss", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(classification_loss<T>(c, false))});
  add(table, {"NllLossGrad", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(nll_grad<T>(c))});
#undef ONNXDDP_FLOAT
}

}  // namespace onnxddp::cpu

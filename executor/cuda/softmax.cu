// Softmax, log-softmax and the classification losses, each with its gradient.
#include "executor/cuda/kernels.h"
#include "executor/cuda/rows.h"

namespace onnxddp::cuda {
namespace {

__device__ inline std::int64_t row_start(const Rows& rows, std::int64_t row) {
  return row / rows.inner * rows.n * rows.inner + row % rows.inner;
}

/// max(x) and sum(exp(x - max)) of a row. As in every kernel here each thread reads the elements lane, lane +
/// group, ….
struct MaxAndSum {
  float max, sum;
};
template <int kGroup, class T>
__device__ inline MaxAndSum max_and_sum(const T* x, const Rows& rows) {
  using Group = RowGroup<kGroup>;
  float most = -INFINITY, sum = 0;
  for (std::int64_t i = Group::lane(); i < rows.n; i += kGroup) {
    const float value = load(x[i * rows.inner]);
    most = MaxOp{}(most, value);
  }
  most = Group::max(most);
  for (std::int64_t i = Group::lane(); i < rows.n; i += kGroup) sum += expf(load(x[i * rows.inner]) - most);
  return {most, Group::sum(sum)};
}

template <int kGroup, bool kLog, class T>
__global__ void __launch_bounds__(kRowThreads<kGroup>) softmax_kernel(Rows rows, const T* x, T* y) {
  using Group = RowGroup<kGroup>;
  const std::int64_t row = Group::row();
  if (row >= rows.count) return;
  x += row_start(rows, row);
  y += row_start(rows, row);
  const MaxAndSum s = max_and_sum<kGroup>(x, rows);
  const float scale = 1.0f / s.sum, log_sum = logf(s.sum);
  for (std::int64_t i = Group::lane() * rows.inner; i < rows.n * rows.inner; i += kGroup * rows.inner) {
    const float d = load(x[i]) - s.max;
    y[i] = store<T>(kLog ? d - log_sum : expf(d) * scale);
  }
}

template <int kGroup, bool kLog, class T>
__global__ void __launch_bounds__(kRowThreads<kGroup>)
    softmax_grad_kernel(Rows rows, const T* dy, const T* y, T* dx) {
  using Group = RowGroup<kGroup>;
  const std::int64_t row = Group::row();
  if (row >= rows.count) return;
  const std::int64_t start = row_start(rows, row), step = kGroup * rows.inner,
                     end = start + rows.n * rows.inner;
  float sum = 0;
  for (std::int64_t i = start + Group::lane() * rows.inner; i < end; i += step)
    sum += kLog ? load(dy[i]) : load(dy[i]) * load(y[i]);
  sum = Group::sum(sum);
  for (std::int64_t i = start + Group::lane() * rows.inner; i < end; i += step) {
    const float d = load(dy[i]), value = load(y[i]);
    dx[i] = store<T>(kLog ? d - expf(value) * sum : value * (d - sum));
  }
}

struct LabelReader {
  const void* data;
  bool wide;
  std::int64_t ignore;
  FaultWord* fault;
  /// The label of a row, -1 if it does not count. `report`: one thread a row says so if it is out of range.
  __device__ std::int64_t at(std::int64_t row, std::int64_t classes, bool report) const {
    const std::int64_t label =
        wide ? static_cast<const std::int64_t*>(data)[row] : static_cast<const std::int32_t*>(data)[row];
    if (label == ignore) return -1;
    if (label >= 0 && label < classes) return label;
    if (report && fault != nullptr) atomicMin(fault, fault_word(row, label));
    return -1;
  }
};

template <int kGroup, class T>
__global__ void __launch_bounds__(kRowThreads<kGroup>)
    loss_kernel(Rows rows, bool logits, const T* x, const void* data, bool wide, std::int64_t ignore,
                FaultWord* fault, double* losses) {
  using Group = RowGroup<kGroup>;
  const std::int64_t row = Group::row();
  if (row >= rows.count) return;
  x += row_start(rows, row);
  const bool first = Group::lane() == 0;
  const std::int64_t label = LabelReader{data, wide, ignore, fault}.at(row, rows.n, first);
  double loss = 0;
  if (label >= 0 && logits) {
    const MaxAndSum s = max_and_sum<kGroup>(x, rows);
    loss = static_cast<double>(s.max) + static_cast<double>(logf(s.sum));
  }
  if (label >= 0) loss -= static_cast<double>(load(x[label * rows.inner]));
  if (first) losses[row] = loss;
}

template <class T>
__global__ void __launch_bounds__(kThreads) loss_sum_kernel(const double* losses, std::int64_t n, T* y) {
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x) total += losses[i];
  total = block_sum(total);
  if (threadIdx.x == 0) *y = store<T>(static_cast<float>(total));
}

template <int kGroup, class T>
__global__ void __launch_bounds__(kRowThreads<kGroup>)
    loss_grad_kernel(Rows rows, bool logits, const T* x, const void* data, bool wide, std::int64_t ignore,
                     FaultWord* fault, const T* dy, T* dx) {
  using Group = RowGroup<kGroup>;
  const std::int64_t row = Group::row();
  if (row >= rows.count) return;
  const std::int64_t start = row_start(rows, row);
  const std::int64_t label = LabelReader{data, wide, ignore, fault}.at(row, rows.n, Group::lane() == 0);
  const bool probabilities = logits && label >= 0;
  const MaxAndSum s = probabilities ? max_and_sum<kGroup>(x + start, rows) : MaxAndSum{0.0f, 1.0f};
  const float factor = load(*dy), scale = 1.0f / s.sum;
  for (std::int64_t i = Group::lane(); i < rows.n; i += kGroup) {
    const std::int64_t at = start + i * rows.inner;
    const float p = probabilities ? expf(load(x[at]) - s.max) * scale : 0.0f;
    dx[at] = store<T>(label < 0 ? 0.0f : factor * (p - (i == label ? 1.0f : 0.0f)));
  }
}

template <bool kLog>
void run_softmax(DType dtype, const Rows& rows, const void* in, void* out, cudaStream_t stream) {
  const std::int64_t n = rows.count * rows.n;
  with_float("softmax", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    T* y = static_cast<T*>(out);
    with_group(rows.n, rows.inner, [&](auto group) {
      launch("softmax", softmax_kernel<group, kLog, T>, row_grid<group>(rows.count), dim3(kRowThreads<group>),
             0, stream, {reads(x, n), writes(y, n)}, rows, x, y);
    });
  });
}

template <bool kLog>
void run_softmax_grad(DType dtype, const Rows& rows, const void* dy_in, const void* y_in, void* out,
                      cudaStream_t stream) {
  const std::int64_t n = rows.count * rows.n;
  with_float("softmax_grad", dtype, [&](auto element) {
    using T = decltype(element);
    const T* dy = static_cast<const T*>(dy_in);
    const T* y = static_cast<const T*>(y_in);
    T* dx = static_cast<T*>(out);
    with_group(rows.n, rows.inner, [&](auto group) {
      launch("softmax_grad", softmax_grad_kernel<group, kLog, T>, row_grid<group>(rows.count),
             dim3(kRowThreads<group>), 0, stream, {reads(dy, n), reads(y, n), writes(dx, n)}, rows, dy, y,
             dx);
    });
  });
}

Range label_range(const Labels& labels, std::int64_t rows) {
  return reads(static_cast<const char*>(labels.data), rows * (labels.wide ? 8 : 4));
}
Range fault_range(FaultWord* fault) { return updates(fault, fault == nullptr ? 0 : 1); }

}  // namespace

void softmax(DType dtype, const Rows& rows, const void* x, void* y, cudaStream_t stream) {
  run_softmax<false>(dtype, rows, x, y, stream);
}
void log_softmax(DType dtype, const Rows& rows, const void* x, void* y, cudaStream_t stream) {
  run_softmax<true>(dtype, rows, x, y, stream);
}
void softmax_grad(DType dtype, const Rows& rows, const void* dy, const void* y, void* dx,
                  cudaStream_t stream) {
  run_softmax_grad<false>(dtype, rows, dy, y, dx, stream);
}
void log_softmax_grad(DType dtype, const Rows& rows, const void* dy, const void* y, void* dx,
                      cudaStream_t stream) {
  run_softmax_grad<true>(dtype, rows, dy, y, dx, stream);
}

std::size_t loss_scratch_bytes(const Rows& rows) {
  return static_cast<std::size_t>(rows.count) * sizeof(double);
}

void classification_loss(DType dtype, const Rows& rows, bool logits, const void* in, const Labels& labels,
                         void* loss, void* scratch, cudaStream_t stream) {
  double* losses = static_cast<double*>(scratch);
  with_float("classification_loss", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    T* y = static_cast<T*>(loss);
    with_group(logits ? rows.n : 1, rows.inner, [&](auto group) {
      launch("classification_loss", loss_kernel<group, T>, row_grid<group>(rows.count),
             dim3(kRowThreads<group>), 0, stream,
             {reads(x, rows.count * rows.n), label_range(labels, rows.count), fault_range(labels.fault),
              writes(losses, rows.count)},
             rows, logits, x, labels.data, labels.wide, labels.ignore, labels.fault, losses);
    });
    launch("loss_sum", loss_sum_kernel<T>, dim3(1), dim3(rows.count > kWarp ? kThreads : kWarp), 0, stream,
           {reads(losses, rows.count), writes(y, 1)}, losses, rows.count, y);
  });
}

void classification_loss_grad(DType dtype, const Rows& rows, bool logits, const void* in,
                              const Labels& labels, const void* dy_in, void* out, cudaStream_t stream) {
  const std::int64_t n = rows.count * rows.n;
  with_float("classification_loss_grad", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = logits ? static_cast<const T*>(in) : nullptr;
    const T* dy = static_cast<const T*>(dy_in);
    T* dx = static_cast<T*>(out);
    with_group(rows.n, rows.inner, [&](auto group) {
      launch("classification_loss_grad", loss_grad_kernel<group, T>, row_grid<group>(rows.count),
             dim3(kRowThreads<group>), 0, stream,
             {maybe_reads(x, n), label_range(labels, rows.count), fault_range(labels.fault), reads(dy, 1),
              writes(dx, n)},
             rows, logits, x, labels.data, labels.wide, labels.ignore, labels.fault, dy, dx);
    });
  });
}

}  // namespace onnxddp::cuda

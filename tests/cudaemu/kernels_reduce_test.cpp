// Kernels that reduce: reductions over axes, ArgMax, softmax and the losses.
#include "tests/cudaemu/kernels_testing.h"

namespace cudaemu_test {
namespace {

namespace cuda = onnxddp::cuda;
using onnxddp::cuda::dense_strides;

class ReduceKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Schedules, ReduceKernels, schedules());

struct ReduceCase {
  Ints shape;
  std::vector<bool> gone;
};
const ReduceCase kReductions[] = {{{}, {}},
                                  {{7, 23}, {false, true}},
                                  {{23, 7}, {true, false}},
                                  {{3, 4, 5, 6}, {true, false, true, true}},
                                  {{5, 3, 4}, {false, true, false}},
                                  {{9001}, {true}},
                                  {{4100, 3}, {true, false}},
                                  {{3, 0}, {false, true}},
                                  {{0, 3}, {false, true}},
                                  {{1, 1}, {true, true}}};

TEST_P(ReduceKernels, SumMeanAndMaxOverAxes) {
  for (const ReduceCase& c : kReductions) {
    const Ints strides = dense_strides(c.shape);
    Ints kept;
    for (std::size_t d = 0; d < c.shape.size(); ++d) kept.push_back(c.gone[d] ? 1 : c.shape[d]);
    const Ints y_strides = dense_strides(kept);
    const auto plan = cuda::plan_reduce(c.shape, strides, c.gone, y_strides);
    const Scratch scratch(cuda::reduce_scratch_bytes(plan));
    for (DType dtype : {DType::f32, DType::bf16, DType::i64, DType::i32}) {
      if (dtype != DType::f32 && product(c.shape) > 500) continue;
      const Doubles x = random(dtype, product(c.shape), -9, 9);
      const double n = static_cast<double>(product(c.shape)) / static_cast<double>(product(kept));
      Doubles sum(static_cast<std::size_t>(product(kept)), 0.0), mean = sum;
      const double least = dtype == DType::i64   ? static_cast<double>(INT64_MIN)
                           : dtype == DType::i32 ? static_cast<double>(INT32_MIN)
                                                 : -INFINITY;
      Doubles most(sum.size(), least);
      each_index(c.shape, [&](const Ints& i) {
        Ints j = i;
        for (std::size_t d = 0; d < j.size(); ++d) j[d] = c.gone[d] ? 0 : j[d];
        const double value = x[offset_of(i, strides)];
        double& top = most[offset_of(j, y_strides)];
        sum[offset_of(j, y_strides)] += value;
        top = std::max(top, value);
      });
      for (std::size_t i = 0; i < sum.size(); ++i) mean[i] = sum[i] / n;
      const Tensor in(dtype, x, 1, stream_), out(dtype, product(kept), 1);
      cuda::reduce(cuda::Reduction::sum, plan, dtype, in.get(), out.get(), scratch.get(), stream_);
      EXPECT_TRUE(near(dtype, out.read(stream_), sum, 4)) << "sum, case " << &c - kReductions;
      cuda::reduce(cuda::Reduction::max, plan, dtype, in.get(), out.get(), scratch.get(), stream_);
      EXPECT_TRUE(near(dtype, out.read(stream_), most)) << "max, case " << &c - kReductions;
      if (dtype == DType::i64 || dtype == DType::i32) continue;
      cuda::reduce(cuda::Reduction::mean, plan, dtype, in.get(), out.get(), scratch.get(), stream_);
      EXPECT_TRUE(near(dtype, out.read(stream_), mean)) << "mean, case " << &c - kReductions;
    }
  }
}

TEST_P(ReduceKernels, SumToAndGlobalPoolingInBothLayouts) {
  const Doubles x = random(DType::f32, 2 * 3 * 4);
  const Tensor in(DType::f32, x, 0, stream_), out(DType::f32, 3), pooled(DType::f32, 6);
  auto plan = cuda::plan_sum_to({2, 3, 4}, {12, 4, 1}, {3, 1}, {1, 1});
  cuda::reduce(cuda::Reduction::sum, plan, DType::f32, in.get(), out.get(), nullptr, stream_);
  Doubles expected(3, 0.0), means(6, 0.0);
  each_index({2, 3, 4}, [&](const Ints& i) {
    const double value = x[offset_of(i, {12, 4, 1})];
    expected[static_cast<std::size_t>(i[1])] += value;
  });
  EXPECT_TRUE(near(DType::f32, out.read(stream_), expected));
  // [2, 3, 2, 2] in NHWC: the mean over the image.
  plan = cuda::plan_reduce({2, 3, 2, 2}, {12, 1, 6, 3}, {false, false, true, true}, {3, 1, 1, 1});
  cuda::reduce(cuda::Reduction::mean, plan, DType::f32, in.get(), pooled.get(), nullptr, stream_);
  each_index({2, 3, 2, 2}, [&](const Ints& i) {
    means[static_cast<std::size_t>(i[0] * 3 + i[1])] += x[offset_of(i, {12, 1, 6, 3})] / 4;
  });
  EXPECT_TRUE(near(DType::f32, pooled.read(stream_), means));
}

TEST_P(ReduceKernels, MaximaSeeNaNsAndArgMaxTakesTheFirst) {
  const Tensor x(DType::f32, {1, NAN, 3, 2, 5, 5}, 1, stream_), y(DType::f32, 2), index(DType::i64, 2),
      down(DType::i64, 3);
  const auto plan = cuda::plan_reduce({2, 3}, {3, 1}, {false, true}, {1, 1});
  cuda::reduce(cuda::Reduction::max, plan, DType::f32, x.get(), y.get(), nullptr, stream_);
  EXPECT_TRUE(near(DType::f32, y.read(stream_), {NAN, 5}));
  cuda::arg_max(DType::f32, x.get(), index.as<std::int64_t>(), 2, 3, 1, stream_);
  EXPECT_EQ(index.read(stream_), (Doubles{2, 1}));
  cuda::arg_max(DType::f32, x.get(), down.as<std::int64_t>(), 1, 2, 3, stream_);
  EXPECT_EQ(down.read(stream_), (Doubles{1, 0, 1}));
  for (DType dtype : {DType::bf16, DType::i64, DType::i32}) {
    Doubles row(70, 1.0);
    row[40] = row[69] = 6;
    const Tensor from(dtype, row, 1, stream_), to(DType::i64, 1);
    cuda::arg_max(dtype, from.get(), to.as<std::int64_t>(), 1, 70, 1, stream_);
    EXPECT_EQ(to.read(stream_), Doubles{40});
  }
}

TEST_P(ReduceKernels, CountsLabels) {
  for (bool wide : {true, false}) {
    for (DType to : {DType::f32, DType::bf16, DType::i64, DType::i32}) {
      Doubles labels;
      for (int i = 0; i < (wide ? 300 : 5); ++i) labels.push_back(i % 5 == 3 ? -100 : i % 5);
      const Tensor t(wide ? DType::i64 : DType::i32, labels, 1, stream_), y(to, 1);
      cuda::count_targets(t.get(), wide, static_cast<std::int64_t>(labels.size()), -100, to, y.get(),
                          stream_);
      EXPECT_EQ(y.read(stream_), Doubles{wide ? 240.0 : 4.0});
      cuda::count_targets(t.get(), wide, 0, -100, to, y.get(), stream_);
      EXPECT_EQ(y.read(stream_), Doubles{0});
    }
  }
}

const cuda::Rows kRows[] = {{0, 5, 1}, {3, 1, 1}, {5, 7, 1}, {6, 5, 3}, {2, 1100, 1}, {4, 0, 1}};

std::size_t at_of(const cuda::Rows& rows, std::int64_t row, std::int64_t i) {
  return static_cast<std::size_t>(row / rows.inner * rows.n * rows.inner + row % rows.inner + i * rows.inner);
}
/// log softmax of every row.
Doubles log_softmax_of(const cuda::Rows& rows, const Doubles& x) {
  Doubles y(x.size());
  for (std::int64_t r = 0; r < rows.count; ++r) {
    double most = -INFINITY, sum = 0;
    for (std::int64_t i = 0; i < rows.n; ++i) most = std::max(most, x[at_of(rows, r, i)]);
    for (std::int64_t i = 0; i < rows.n; ++i) sum += std::exp(x[at_of(rows, r, i)] - most);
    for (std::int64_t i = 0; i < rows.n; ++i)
      y[at_of(rows, r, i)] = x[at_of(rows, r, i)] - most - std::log(sum);
  }
  return y;
}
Doubles exp_of(Doubles x) {
  for (double& v : x) v = std::exp(v);
  return x;
}

TEST_P(ReduceKernels, SoftmaxAndItsGradients) {
  for (const cuda::Rows& rows : kRows) {
    for (DType dtype : kFloats) {
      const std::int64_t n = rows.count * rows.n;
      const Doubles x = random(dtype, n, -6, 6), dy = random(dtype, n), logs = log_softmax_of(rows, x),
                    p = exp_of(logs);
      const Tensor in(dtype, x, 1, stream_), from(dtype, dy, 0, stream_), y(dtype, n, 1), log_y(dtype, n),
          dx(dtype, n), log_dx(dtype, n);
      cuda::softmax(dtype, rows, in.get(), y.get(), stream_);
      cuda::log_softmax(dtype, rows, in.get(), log_y.get(), stream_);
      EXPECT_TRUE(near(dtype, y.read(stream_), p));
      EXPECT_TRUE(near(dtype, log_y.read(stream_), logs));
      cuda::softmax_grad(dtype, rows, from.get(), y.get(), dx.get(), stream_);
      cuda::log_softmax_grad(dtype, rows, from.get(), log_y.get(), log_dx.get(), stream_);
      Doubles expected(x.size()), log_expected(x.size());
      for (std::int64_t r = 0; r < rows.count; ++r) {
        double products = 0, sum = 0;
        for (std::int64_t i = 0; i < rows.n; ++i) {
          products += dy[at_of(rows, r, i)] * p[at_of(rows, r, i)];
          sum += dy[at_of(rows, r, i)];
        }
        for (std::int64_t i = 0; i < rows.n; ++i) {
          const std::size_t at = at_of(rows, r, i);
          expected[at] = p[at] * (dy[at] - products);
          log_expected[at] = dy[at] - p[at] * sum;
        }
      }
      EXPECT_TRUE(near(dtype, dx.read(stream_), expected, 4));
      EXPECT_TRUE(near(dtype, log_dx.read(stream_), log_expected, 4));
    }
  }
}

TEST_P(ReduceKernels, ClassificationLossesAndTheirGradients) {
  for (const cuda::Rows& rows : kRows) {
    if (rows.n == 0) continue;
    for (DType dtype : kFloats) {
      for (bool logits : {true, false}) {
        const std::int64_t n = rows.count * rows.n;
        const Doubles x = random(dtype, n, -6, 6), dy = {rounded(dtype, 0.7)};
        const Doubles logs = logits ? log_softmax_of(rows, x) : x, p = exp_of(logs);
        Doubles labels, expected(x.size(), 0.0);
        double loss = 0;
        for (std::int64_t r = 0; r < rows.count; ++r) {
          const std::int64_t label = r == 1 ? -100 : (r * 5) % rows.n;
          labels.push_back(static_cast<double>(label));
          if (label < 0) continue;
          loss -= logs[at_of(rows, r, label)];
          for (std::int64_t i = 0; i < rows.n; ++i) {
            const std::size_t at = at_of(rows, r, i);
            expected[at] = dy[0] * ((logits ? p[at] : 0.0) - (i == label ? 1.0 : 0.0));
          }
        }
        const bool wide = logits;
        const Tensor in(dtype, x, 1, stream_), t(wide ? DType::i64 : DType::i32, labels, 1, stream_),
            y(dtype, 1), dx(dtype, n, 1), from(dtype, dy, 0, stream_), fault(DType::i64, {-1}, 0, stream_);
        const Scratch scratch(cuda::loss_scratch_bytes(rows));
        const cuda::Labels target{t.get(), wide, -100, fault.as<cuda::FaultWord>()};
        cuda::classification_loss(dtype, rows, logits, in.get(), target, y.get(), scratch.get(), stream_);
        cuda::classification_loss_grad(dtype, rows, logits, in.get(), target, from.get(), dx.get(), stream_);
        EXPECT_TRUE(near(dtype, y.read(stream_), {loss}));
        EXPECT_TRUE(near(dtype, dx.read(stream_), expected));
        EXPECT_EQ(fault.read(stream_), Doubles{-1});
      }
    }
  }
}

TEST_P(ReduceKernels, BadLabelsAreNamedAndDoNotCount) {
  const cuda::Rows rows{3, 2, 1};
  const Tensor x(DType::f32, {0, 0, 1, 1, 2, 2}, 0, stream_), labels(DType::i64, {1, 12, -3}, 0, stream_),
      y(DType::f32, 1), one(DType::f32, {1}, 0, stream_), dx(DType::f32, 6),
      fault(DType::i64, {-1}, 0, stream_);
  const Scratch scratch(cuda::loss_scratch_bytes(rows));
  const cuda::Labels target{labels.get(), true, -100, fault.as<cuda::FaultWord>()};
  cuda::classification_loss(DType::f32, rows, true, x.get(), target, y.get(), scratch.get(), stream_);
  cuda::classification_loss_grad(DType::f32, rows, true, x.get(), target, one.get(), dx.get(), stream_);
  EXPECT_TRUE(near(DType::f32, y.read(stream_), {std::log(2.0)}));
  EXPECT_TRUE(near(DType::f32, dx.read(stream_), {0.5, -0.5, 0, 0, 0, 0}));
  EXPECT_EQ(fault.read(stream_), Doubles{static_cast<double>((1ll << 32) | 12)});
}

}  // namespace
}  // namespace cudaemu_test

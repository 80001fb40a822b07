// Kernels that normalise and pool: batch norm in parts, layer norm, max and average pooling.
#include "tests/cudaemu/kernels_testing.h"

namespace cudaemu_test {
namespace {

namespace cuda = onnxddp::cuda;

class NormKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Schedules, NormKernels, schedules());

// --- batch norm ---

struct Image {
  cuda::Channels v;
  std::size_t at(std::int64_t i, std::int64_t k) const {
    if (v.pixels) return static_cast<std::size_t>(i * v.c + k);
    return static_cast<std::size_t>((i / v.size * v.c + k) * v.size + i % v.size);
  }
};
const cuda::Channels kChannels[] = {{true, 3, 35, 1},  {true, 16, 9, 1},   {false, 3, 5, 7},
                                    {false, 5, 2, 16}, {true, 40, 300, 1}, {false, 1, 1, 5000},
                                    {true, 1, 1, 1}};

TEST_P(NormKernels, BatchNormInBothLayouts) {
  for (const cuda::Channels& v : kChannels) {
    for (DType dtype : kFloats) {
      if (dtype == DType::bf16 && v.c * v.count() > 1000) continue;
      const Image image{v};
      const std::int64_t m = v.count(), n = m * v.c, c = v.c;
      Doubles x = random(dtype, n, 9, 13), add = random(dtype, n), dy = random(dtype, n);
      const Doubles scale = random(DType::f32, c, 0.5, 2), bias = random(DType::f32, c);
      Doubles stats(static_cast<std::size_t>(2 * c + 2), 0.0), dbias(static_cast<std::size_t>(c), 0.0),
          dscale = dbias, y(x.size()), dx(x.size());
      stats[static_cast<std::size_t>(2 * c + 1)] = static_cast<double>(m);
      const double epsilon = 1e-3;
      for (std::int64_t k = 0; k < c; ++k) {
        const auto channel = static_cast<std::size_t>(k);
        double& mean = stats[channel];
        double& m2 = stats[static_cast<std::size_t>(c + k)];
        for (std::int64_t i = 0; i < m; ++i) mean += x[image.at(i, k)] / static_cast<double>(m);
        for (std::int64_t i = 0; i < m; ++i) m2 += (x[image.at(i, k)] - mean) * (x[image.at(i, k)] - mean);
        const double r = 1 / std::sqrt(m2 / static_cast<double>(m) + epsilon);
        for (std::int64_t i = 0; i < m; ++i) {
          const std::size_t at = image.at(i, k);
          const double xhat = (x[at] - mean) * r;
          y[at] = std::max(0.0, xhat * scale[channel] + bias[channel] + add[at]);
          dbias[channel] += dy[at];
          dscale[channel] += dy[at] * xhat;
        }
        for (std::int64_t i = 0; i < m; ++i) {
          const std::size_t at = image.at(i, k);
          const double xhat = (x[at] - mean) * r;
          dx[at] = scale[channel] * r *
                   (dy[at] - dbias[channel] / static_cast<double>(m) -
                    xhat * dscale[channel] / static_cast<double>(m));
        }
      }
      const std::int64_t shift = c == 3 ? 1 : 0;
      const Tensor in(dtype, x, shift, stream_), plus(dtype, add, shift, stream_),
          from(dtype, dy, shift, stream_), gamma(DType::f32, scale, 1, stream_),
          beta(DType::f32, bias, 1, stream_), s(DType::f32, 2 * c + 2, 1), out(dtype, n, shift),
          db(DType::f32, c), ds(DType::f32, c), back(dtype, n, shift);
      const Scratch scratch(cuda::norm_scratch_bytes(v));
      cuda::batch_stats(dtype, v, in.get(), s.as<float>(), scratch.get(), stream_);
      EXPECT_TRUE(near(DType::f32, s.read(stream_), stats, 5));
      cuda::batch_norm_apply(dtype, v, in.get(), gamma.as<float>(), beta.as<float>(), s.as<float>(), epsilon,
                             plus.get(), true, out.get(), scratch.get(), stream_);
      EXPECT_TRUE(near(dtype, out.read(stream_), y, 4));
      cuda::batch_norm_grad_sums(dtype, v, from.get(), in.get(), s.as<float>(), epsilon, db.as<float>(),
                                 ds.as<float>(), scratch.get(), stream_);
      EXPECT_TRUE(near(DType::f32, db.read(stream_), dbias, 5));
      EXPECT_TRUE(near(DType::f32, ds.read(stream_), dscale, 20));
      cuda::batch_norm_grad_apply(dtype, v, from.get(), in.get(), gamma.as<float>(), s.as<float>(), epsilon,
                                  db.as<float>(), ds.as<float>(), back.get(), scratch.get(), stream_);
      EXPECT_TRUE(near(dtype, back.read(stream_), dx, 20));
    }
  }
}

TEST_P(NormKernels, BatchNormWithFixedStatistics) {
  const cuda::Channels v{true, 2, 2, 1};
  const Tensor x(DType::f32, {1, 2, 3, 4}, 0, stream_), mean(DType::f32, {1, 2}, 0, stream_),
      var(DType::f32, {4, 1}, 0, stream_), scale(DType::f32, {2, 3}, 0, stream_),
      bias(DType::f32, {0, -1}, 0, stream_), s(DType::f32, 6), y(DType::f32, 4), dx(DType::f32, 4);
  const Scratch scratch(cuda::norm_scratch_bytes(v));
  cuda::fixed_stats(mean.as<float>(), var.as<float>(), s.as<float>(), 2, stream_);
  EXPECT_EQ(s.read(stream_), (Doubles{1, 2, 4, 1, 0, 1}));
  cuda::batch_norm_apply(DType::f32, v, x.get(), scale.as<float>(), bias.as<float>(), s.as<float>(), 0,
                         nullptr, false, y.get(), scratch.get(), stream_);
  EXPECT_TRUE(near(DType::f32, y.read(stream_), {0, -1, 2, 5}));
  cuda::batch_norm_grad_apply(DType::f32, v, x.get(), x.get(), scale.as<float>(), s.as<float>(), 0, nullptr,
                              nullptr, dx.get(), scratch.get(), stream_);
  EXPECT_TRUE(near(DType::f32, dx.read(stream_), {1, 6, 3, 12}));
}

TEST_P(NormKernels, StatisticsMergeAndRun) {
  // Ranks with 2, 0 and 3 elements of one channel: {1, 3}, {}, {5, 6, 10}.
  const Tensor gathered(DType::f32, {2, 2, 0, 2, 0, 0, 0, 0, 7, 14, 0, 3}, 0, stream_), s(DType::f32, 4),
      mean(DType::f32, {1}, 0, stream_), var(DType::f32, {2}, 0, stream_), next_mean(DType::f32, 1),
      next_var(DType::f32, 1);
  cuda::merge_stats(gathered.as<float>(), s.as<float>(), 3, 1, stream_);
  EXPECT_TRUE(near(DType::f32, s.read(stream_), {5, 46, 0, 5}));
  cuda::running_stats(mean.as<float>(), var.as<float>(), s.as<float>(), 0.9, true, next_mean.as<float>(),
                      next_var.as<float>(), 1, stream_);
  EXPECT_TRUE(near(DType::f32, next_mean.read(stream_), {1.4}));
  EXPECT_TRUE(near(DType::f32, next_var.read(stream_), {2 * 0.9 + 11.5 * 0.1}));
  cuda::running_stats(mean.as<float>(), var.as<float>(), s.as<float>(), 0.9, false, nullptr, var.as<float>(),
                      1, stream_);
  EXPECT_TRUE(near(DType::f32, var.read(stream_), {2 * 0.9 + 9.2 * 0.1}));
  const cuda::Channels none{false, 2, 0, 3};
  const Tensor x(DType::f32, 0), empty(DType::f32, 6), means(DType::f32, {3, 4}, 0, stream_);
  const Scratch scratch(cuda::norm_scratch_bytes(none));
  cuda::batch_stats(DType::f32, none, x.get(), empty.as<float>(), scratch.get(), stream_);
  EXPECT_EQ(empty.read(stream_), Doubles(6, 0.0));
  cuda::running_stats(means.as<float>(), means.as<float>(), empty.as<float>(), 0.9, true, means.as<float>(),
                      nullptr, 2, stream_);
  EXPECT_EQ(means.read(stream_), (Doubles{3, 4}));
}

TEST_P(NormKernels, LayerNormAndItsGradient) {
  struct Case {
    std::int64_t rows, n;
  };
  for (const auto& [rows, n] : {Case{0, 4}, {3, 1}, {5, 37}, {2, 1100}, {200, 6}}) {
    for (DType dtype : kFloats) {
      if (dtype == DType::bf16 && rows * n > 500) continue;
      const Doubles x = random(dtype, rows * n, 4, 9), dy = random(dtype, rows * n),
                    scale = random(DType::f32, n, 0.5, 2), bias = random(DType::f32, n);
      Doubles y(x.size()), dx(x.size()), dscale(scale.size(), 0.0), dbias = dscale, means, rstds;
      const double count = static_cast<double>(n), epsilon = 1e-2;
      for (std::int64_t r = 0; r < rows; ++r) {
        double mean = 0, m2 = 0, sum = 0, products = 0;
        const auto at = [n = n, r](std::int64_t i) { return static_cast<std::size_t>(r * n + i); };
        for (std::int64_t i = 0; i < n; ++i) mean += x[at(i)] / count;
        for (std::int64_t i = 0; i < n; ++i) m2 += (x[at(i)] - mean) * (x[at(i)] - mean);
        const double rstd = 1 / std::sqrt(m2 / count + epsilon);
        for (std::int64_t i = 0; i < n; ++i) {
          const auto k = static_cast<std::size_t>(i);
          const double xhat = (x[at(i)] - mean) * rstd;
          y[at(i)] = xhat * scale[k] + bias[k];
          dscale[k] += dy[at(i)] * xhat;
          dbias[k] += dy[at(i)];
          sum += dy[at(i)] * scale[k] / count;
          products += dy[at(i)] * scale[k] * xhat / count;
        }
        for (std::int64_t i = 0; i < n; ++i)
          dx[at(i)] = rstd * (dy[at(i)] * scale[static_cast<std::size_t>(i)] - sum -
                              (x[at(i)] - mean) * rstd * products);
        means.push_back(mean);
        rstds.push_back(rstd);
      }
      const Tensor in(dtype, x, 1, stream_), from(dtype, dy, 0, stream_),
          gamma(DType::f32, scale, 0, stream_), beta(DType::f32, bias, 1, stream_), out(dtype, rows * n, 1),
          mean(DType::f32, rows), rstd(DType::f32, rows), back(dtype, rows * n), ds(DType::f32, n),
          db(DType::f32, n);
      cuda::layer_norm(dtype, in.get(), gamma.as<float>(), beta.as<float>(), epsilon, out.get(),
                       mean.as<float>(), rstd.as<float>(), rows, n, stream_);
      EXPECT_TRUE(near(dtype, out.read(stream_), y, 4));
      EXPECT_TRUE(near(DType::f32, mean.read(stream_), means));
      EXPECT_TRUE(near(DType::f32, rstd.read(stream_), rstds, 5));
      const Scratch scratch(cuda::layer_norm_grad_scratch_bytes(rows, n));
      cuda::layer_norm_grad(dtype, from.get(), in.get(), gamma.as<float>(), mean.as<float>(),
                            rstd.as<float>(), back.get(), ds.as<float>(), db.as<float>(), rows, n,
                            scratch.get(), stream_);
      EXPECT_TRUE(near(dtype, back.read(stream_), dx, 20));
      EXPECT_TRUE(near(DType::f32, ds.read(stream_), dscale, 10));
      EXPECT_TRUE(near(DType::f32, db.read(stream_), dbias, 10));
      cuda::layer_norm(dtype, in.get(), gamma.as<float>(), nullptr, epsilon, in.get(), mean.as<float>(),
                       rstd.as<float>(), rows, n, stream_);
    }
  }
}

// --- pooling ---

/// n, c, h, w, oh, ow; kernel, strides, dilations; pads; layout; count_include_pad.
const cuda::Pool kPools[] = {
    {2, 3, 5, 4, 5, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, false, false},
    {1, 2, 7, 7, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, false, true},
    {1, 2, 6, 5, 3, 3, 2, 2, 2, 2, 1, 1, 0, 0, 0, 0, false, true},  // ceil_mode: beyond the image
    {1, 1, 7, 6, 3, 2, 2, 3, 2, 1, 2, 2, 0, 0, 0, 0, false, false},
    {2, 3, 4, 5, 1, 1, 4, 5, 1, 1, 1, 1, 0, 0, 0, 0, false, false},  // global
    {0, 3, 4, 4, 2, 2, 2, 2, 2, 2, 1, 1, 0, 0, 0, 0, false, false},
    {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, false, false}};

struct PoolReference {
  Doubles most, average, most_grad, average_grad;
};
PoolReference pool_reference(const cuda::Pool& p, const Doubles& x, const Doubles& dy) {
  const Ints image =
      p.nhwc ? Ints{p.h * p.w * p.c, 1, p.w * p.c, p.c} : Ints{p.c * p.h * p.w, p.h * p.w, p.w, 1};
  const Ints pooled =
      p.nhwc ? Ints{p.oh * p.ow * p.c, 1, p.ow * p.c, p.c} : Ints{p.c * p.oh * p.ow, p.oh * p.ow, p.ow, 1};
  PoolReference r{Doubles(dy.size()), Doubles(dy.size()), Doubles(x.size(), 0.0), Doubles(x.size(), 0.0)};
  each_index({p.n, p.c, p.oh, p.ow}, [&](const Ints& o) {
    const std::size_t out = offset_of(o, pooled);
    double most = -INFINITY, sum = 0;
    int inside = 0, padded = 0;
    std::vector<std::size_t> taps;
    std::size_t first = 0;
    for (int i = 0; i < p.kh; ++i) {
      for (int j = 0; j < p.kw; ++j) {
        const std::int64_t h = o[2] * p.sh - p.ph + i * p.dh, w = o[3] * p.sw - p.pw + j * p.dw;
        if (h < p.h + p.ph_end && w < p.w + p.pw_end) ++padded;
        if (h < 0 || w < 0 || h >= p.h || w >= p.w) continue;
        const std::size_t at = offset_of({o[0], o[1], h, w}, image);
        if (taps.empty() || x[at] > most) most = x[at], first = at;
        sum += x[at];
        taps.push_back(at);
        ++inside;
      }
    }
    const double divisor = p.count_pads ? padded : inside;
    r.most[out] = most;
    r.average[out] = sum / std::max(divisor, 1.0);
    if (!taps.empty()) r.most_grad[first] += dy[out];
    for (std::size_t at : taps) r.average_grad[at] += dy[out] / divisor;
  });
  return r;
}

TEST_P(NormKernels, PoolingInBothLayouts) {
  for (cuda::Pool p : kPools) {
    for (bool nhwc : {false, true}) {
      p.nhwc = nhwc;
      for (DType dtype : kFloats) {
        Doubles x = random(dtype, p.n * p.c * p.h * p.w);
        const Doubles dy = random(dtype, p.n * p.c * p.oh * p.ow);
        for (std::size_t i = 0; i < x.size(); i += 3) x[i] = 1;  // ties
        const PoolReference expected = pool_reference(p, x, dy);
        const auto n = static_cast<std::int64_t>(x.size()), m = static_cast<std::int64_t>(dy.size());
        const Tensor in(dtype, x, 1, stream_), from(dtype, dy, 1, stream_), y(dtype, m, 1), dx(dtype, n, 1);
        cuda::max_pool(dtype, p, in.get(), y.get(), stream_);
        cuda::max_pool_grad(dtype, p, from.get(), in.get(), dx.get(), stream_);
        EXPECT_TRUE(near(dtype, y.read(stream_), expected.most)) << "pool " << nhwc;
        EXPECT_TRUE(near(dtype, dx.read(stream_), expected.most_grad)) << "pool " << nhwc;
        cuda::average_pool(dtype, p, in.get(), y.get(), stream_);
        cuda::average_pool_grad(dtype, p, from.get(), dx.get(), stream_);
        EXPECT_TRUE(near(dtype, y.read(stream_), expected.average)) << "pool " << nhwc;
        EXPECT_TRUE(near(dtype, dx.read(stream_), expected.average_grad)) << "pool " << nhwc;
      }
    }
  }
}

}  // namespace
}  // namespace cudaemu_test

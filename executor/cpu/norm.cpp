// Batch normalisation in parts: statistics, their merge over ranks, application, gradient. Sums are in
// double.
#include <cmath>

#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

constexpr std::int64_t kBlock = 16;  // channels that are summed together: two vectors of float

/// Calls f(channel, first element, elements) for every run of elements of channels [begin, end) in plane
/// order.
template <class F>
void each_plane(const Channels& v, std::int64_t begin, std::int64_t end, const F& f) {
  for (std::int64_t c = begin; c < end; ++c) {
    for (std::int64_t n = 0; n < v.batch; ++n) f(c, (n * v.c + c) * v.size, v.size);
  }
}

/// Per-channel constants that live on the stack in blocks; T as the tensor's.
template <class T>
struct Stats {
  const T* mean;
  const T* m2;
  double count;
  Stats(const T* stats, std::int64_t c)
      : mean(stats),
        m2(stats + c),
        count(static_cast<double>(stats[2 * c]) * 1048576.0 + static_cast<double>(stats[2 * c + 1])) {}
  double deviation(std::int64_t c, double epsilon) const {
    return 1.0 / std::sqrt(static_cast<double>(m2[c]) / count + epsilon);
  }
};

/// Runs f over parts of the channels: blocks of kBlock for pixels, single channels for planes.
template <class F>
void over_channels(const Channels& v, int threads, const F& f) {
  const std::int64_t step = v.pixels ? kBlock : 1, jobs = (v.c + step - 1) / step;
  parallel_for(threads, jobs, grain_of(v.count() * step),
               [&](std::int64_t begin, std::int64_t end) { f(begin * step, std::min(end * step, v.c)); });
}

/// Sums of a and of a*b over the rows of pixels for channels [c0, c0+m), m <= kBlock, where get(row pointer
/// offset, lane) fills a and b. The lanes are fixed so that the sums stay in registers.
template <class F>
void sum_pixels(const Channels& v, std::int64_t c0, std::int64_t m, double* first, double* second,
                const F& get) {
  double s[kBlock] = {}, q[kBlock] = {};
  if (m == kBlock) {
    for (std::int64_t row = 0; row < v.batch; ++row) {
      const std::int64_t at = row * v.c + c0;
#pragma omp simd
      for (int j = 0; j < kBlock; ++j) {
        const auto [a, b] = get(at + j, c0 + j);
        s[j] += a;
        q[j] += a * b;
      }
    }
  } else {
    for (std::int64_t row = 0; row < v.batch; ++row) {
      const std::int64_t at = row * v.c + c0;
      for (std::int64_t j = 0; j < m; ++j) {
        const auto [a, b] = get(at + j, c0 + j);
        s[j] += a;
        q[j] += a * b;
      }
    }
  }
  std::copy(s, s + m, first);
  std::copy(q, q + m, second);
}

struct Pair {
  double a, b;
};

template <class F>
void sum_planes(const Channels& v, std::int64_t c, double* first, double* second, const F& get) {
  constexpr int kLanes = 8;
  double s[kLanes] = {}, q[kLanes] = {};
  each_plane(v, c, c + 1, [&](std::int64_t channel, std::int64_t at, std::int64_t size) {
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
#pragma omp simd
      for (int j = 0; j < kLanes; ++j) {
        const auto [a, b] = get(at + i + j, channel);
        s[j] += a;
        q[j] += a * b;
      }
    }
    for (; i < size; ++i) {
      const auto [a, b] = get(at + i, channel);
      s[i % kLanes] += a;
      q[i % kLanes] += a * b;
    }
  });
  *first = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  *second = ((q[0] + q[1]) + (q[2] + q[3])) + ((q[4] + q[5]) + (q[6] + q[7]));
}

/// Sums of a and a*b of every channel in [begin, end): done(channel, sum a, sum a*b).
template <class F, class G>
void channel_sums(const Channels& v, std::int64_t begin, std::int64_t end, const F& get, const G& done) {
  if (!v.pixels) {
    for (std::int64_t c = begin; c < end; ++c) {
      double a = 0, b = 0;
      sum_planes(v, c, &a, &b, get);
      done(c, a, b);
    }
    return;
  }
  for (std::int64_t c0 = begin; c0 < end; c0 += kBlock) {
    const std::int64_t m = std::min(kBlock, end - c0);
    double a[kBlock], b[kBlock];
    sum_pixels(v, c0, m, a, b, get);
    for (std::int64_t j = 0; j < m; ++j) done(c0 + j, a[j], b[j]);
  }
}

/// mean and M2 in one pass over the deviations from the channel's first element: those are of the size of the
/// spread, so that nothing cancels. f64 makes a second pass about the mean.
template <class T>
Run batch_stats(const PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  const int threads = c.threads;
  return [=](const RunContext& r) {
    const T* x = r.in<T>(0);
    T* stats = r.out<T>(0);
    const double count = static_cast<double>(v.count());
    stats[2 * v.c] = static_cast<T>(v.count() >> 20);
    stats[2 * v.c + 1] = static_cast<T>(v.count() & 0xFFFFF);
    if (v.count() == 0) {
      std::fill(stats, stats + 2 * v.c, T(0));
      return;
    }
    T* mean = stats;
    T* m2 = stats + v.c;
    // The origin of a channel: its first element, kept in the place of M2 until that is known.
    for (std::int64_t k = 0; k < v.c; ++k) m2[k] = x[k * v.size];
    over_channels(v, threads, [&](std::int64_t begin, std::int64_t end) {
      const auto deviation = [&](std::int64_t at, std::int64_t k) {
        const double d = static_cast<double>(x[at] - m2[k]);
        return Pair{d, d};
      };
      channel_sums(v, begin, end, deviation, [&](std::int64_t k, double sum, double squares) {
        mean[k] = static_cast<T>(static_cast<double>(m2[k]) + sum / count);
        m2[k] = static_cast<T>(std::max(0.0, squares - sum * sum / count));
      });
      if constexpr (std::is_same_v<T, double>) {
        const auto about_mean = [&](std::int64_t at, std::int64_t k) {
          const double d = x[at] - mean[k];
          return Pair{d, d};
        };
        channel_sums(v, begin, end, about_mean, [&](std::int64_t k, double sum, double squares) {
          mean[k] += sum / count;
          m2[k] = std::max(0.0, squares - sum * sum / count);
        });
      }
    });
  };
}

/// Chan's parallel formula over the ranks' statistics, in rank order. Ranks without elements change nothing.
template <class T>
Run merge_stats(const PlanContext& c) {
  const std::int64_t ranks = c.inputs[0].shape[0], width = c.inputs[0].shape[1], channels = (width - 2) / 2;
  return [=](const RunContext& r) {
    const T* in = r.in<T>(0);
    T* out = r.out<T>(0);
    std::int64_t total = 0;
    for (std::int64_t k = 0; k < ranks; ++k) {
      total += static_cast<std::int64_t>(Stats<T>(in + k * width, channels).count);
    }
    for (std::int64_t k = 0; k < channels; ++k) {
      double mean = 0, m2 = 0, count = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const Stats<T> s(in + rank * width, channels);
        if (s.count == 0) continue;
        const double delta = static_cast<double>(s.mean[k]) - mean, both = count + s.count;
        mean += delta * (s.count / both);
        m2 += static_cast<double>(s.m2[k]) + delta * delta * (count * s.count / both);
        count = both;
      }
      out[k] = static_cast<T>(mean);
      out[channels + k] = static_cast<T>(m2);
    }
    out[2 * channels] = static_cast<T>(total >> 20);
    out[2 * channels + 1] = static_cast<T>(total & 0xFFFFF);
  };
}

template <class T>
Run fixed_stats(const PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel();
  return [=](const RunContext& r) {
    T* out = r.out<T>(0);
    std::copy(r.in<T>(0), r.in<T>(0) + n, out);
    std::copy(r.in<T>(1), r.in<T>(1) + n, out + n);
    out[2 * n] = T(0);
    out[2 * n + 1] = T(1);
  };
}

/// y = f(elements at i, channel constants at c) for all elements; f(i, c).
template <class F>
void for_elements(const Channels& v, int threads, const F& f) {
  if (v.pixels) {
    parallel_for(threads, v.batch, grain_of(v.c), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t at = row * v.c;
#pragma omp simd
        for (std::int64_t k = 0; k < v.c; ++k) f(at + k, k);
      }
    });
    return;
  }
  parallel_for(threads, v.batch * v.c, grain_of(v.size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t plane = begin; plane < end; ++plane) {
      const std::int64_t k = plane % v.c, at = plane * v.size;
#pragma omp simd
      for (std::int64_t i = 0; i < v.size; ++i) f(at + i, k);
    }
  });
}

/// y = (x - mean) * scale / sqrt(M2/count + eps) + bias
template <class T>
Run apply(PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  const double epsilon = c.number("epsilon");
  const int threads = c.threads;
  c.scratch_bytes = static_cast<std::size_t>(v.c) * sizeof(T);
  return [=](const RunContext& r) {
    const T* x = r.in<T>(0);
    const T* scale = r.in<T>(1);
    const T* bias = r.in<T>(2);
    const Stats<T> stats(r.in<T>(3), v.c);
    T* y = r.out<T>(0);
    T* factor = static_cast<T*>(r.scratch);
    for (std::int64_t k = 0; k < v.c; ++k) {
      factor[k] = static_cast<T>(static_cast<double>(scale[k]) * stats.deviation(k, epsilon));
    }
    const T* mean = stats.mean;
    for_elements(v, threads,
                 [=](std::int64_t i, std::int64_t k) { y[i] = (x[i] - mean[k]) * factor[k] + bias[k]; });
  };
}

/// dbias = sum dy, dscale = sum dy * xhat
template <class T>
Run grad_sums(const PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  const double epsilon = c.number("epsilon");
  const int threads = c.threads;
  const bool both = c.has_output(1);
  return [=](const RunContext& r) {
    const T* dy = r.in<T>(0);
    const T* x = r.in<T>(1);
    const Stats<T> stats(r.in<T>(2), v.c);
    T* dbias = r.out<T>(0);
    T* dscale = both ? r.out<T>(1) : nullptr;
    const T* mean = stats.mean;
    over_channels(v, threads, [&](std::int64_t begin, std::int64_t end) {
      const auto terms = [=](std::int64_t at, std::int64_t k) {
        return Pair{static_cast<double>(dy[at]), static_cast<double>(x[at] - mean[k])};
      };
      channel_sums(v, begin, end, terms, [&](std::int64_t k, double sum, double products) {
        if (dbias) dbias[k] = static_cast<T>(sum);
        if (dscale) dscale[k] = static_cast<T>(products * stats.deviation(k, epsilon));
      });
    });
  };
}

/// dx = scale*r * (dy - dbias/m - xhat*dscale/m), or scale*r*dy without the sums; r = 1/sqrt(M2/count + eps).
template <class T>
Run grad_apply(PlanContext& c) {
  const Channels v = channels_of(c.inputs[0]);
  const double epsilon = c.number("epsilon");
  const int threads = c.threads;
  const bool sums = c.has(4) && c.has(5);
  c.scratch_bytes = static_cast<std::size_t>(v.c) * 3 * sizeof(T);
  return [=](const RunContext& r) {
    const T* dy = r.in<T>(0);
    const T* x = r.in<T>(1);
    const T* scale = r.in<T>(2);
    const Stats<T> stats(r.in<T>(3), v.c);
    T* dx = r.out<T>(0);
    T* factor = static_cast<T*>(r.scratch);
    T* shift = factor + v.c;
    T* slope = shift + v.c;
    for (std::int64_t k = 0; k < v.c; ++k) {
      const double deviation = stats.deviation(k, epsilon);
      factor[k] = static_cast<T>(static_cast<double>(scale[k]) * deviation);
      if (!sums) continue;
      shift[k] = static_cast<T>(static_cast<double>(r.in<T>(4)[k]) / stats.count);
      slope[k] = static_cast<T>(static_cast<double>(r.in<T>(5)[k]) * deviation / stats.count);
    }
    if (!sums) {
      for_elements(v, threads, [=](std::int64_t i, std::int64_t k) { dx[i] = factor[k] * dy[i]; });
      return;
    }
    const T* mean = stats.mean;
    for_elements(v, threads, [=](std::int64_t i, std::int64_t k) {
      dx[i] = factor[k] * ((dy[i] - shift[k]) - (x[i] - mean[k]) * slope[k]);
    });
  };
}

template <class T>
Run running_stats(const PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel();
  const double momentum = c.number("momentum");
  const bool unbiased = c.flag("unbiased"), both = c.has_output(1);
  return [=](const RunContext& r) {
    const Stats<T> stats(r.in<T>(2), n);
    const double divisor = unbiased ? std::max(stats.count - 1.0, 1.0) : std::max(stats.count, 1.0);
    const T keep = static_cast<T>(momentum), take = static_cast<T>(1.0 - momentum);
    for (std::int64_t k = 0; k < n; ++k) {
      const T mean = r.in<T>(0)[k], var = r.in<T>(1)[k];
      const bool any = stats.count > 0;
      if (r.out<T>(0)) r.out<T>(0)[k] = any ? mean * keep + stats.mean[k] * take : mean;
      if (both)
        r.out<T>(1)[k] =
            any ? var * keep + static_cast<T>(static_cast<double>(stats.m2[k]) / divisor) * take : var;
    }
  };
}

/// x in the layout it comes in; the statistics are vectors.
LayoutChoice statistics_of(const PlanContext& c) {
  LayoutChoice choice{std::vector<Layout>(c.inputs.size(), Layout::dense),
                      std::vector<Layout>(c.outputs.size(), Layout::dense)};
  choice.inputs[0] = c.inputs[0].layout;
  return choice;
}

}  // namespace

void add_norms(KernelTable& table) {
#define ONNXDDP_FLOAT(CALL)                                         \
  [](PlanContext& c) {                                              \
    return with_float(c.inputs[0].dtype, [&](auto element) -> Run { \
      using T = decltype(element);                                  \
      return CALL;                                                  \
    });                                                             \
  }
  add(table, {"BatchStats", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(batch_stats<T>(c)), statistics_of});
  add(table, {"FixedStats", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(fixed_stats<T>(c))});
  add(table, {"MergeStats", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(merge_stats<T>(c))});
  add(table, {"BatchNormApply", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(apply<T>(c)), same_layout});
  add(table, {"RunningStats", kFloats, LayoutRule::dense, ONNXDDP_FLOAT(running_stats<T>(c))});
  add(table, {"BatchNormGradSums", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(grad_sums<T>(c)), same_layout});
  add(table,
      {"BatchNormGradApply", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(grad_apply<T>(c)), same_layout});
#undef ONNXDDP_FLOAT
}

}  // namespace onnxddp::cpu

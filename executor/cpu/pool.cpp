// Max and average pooling with gradients. In NHWC the innermost loop runs over the channels of a pixel.
#include <limits>
#include <type_traits>

#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

struct Pool {
  std::int64_t n, c, h, w, oh, ow;
  std::int64_t kh, kw, sh, sw, ph, pw, ph_end, pw_end, dh, dw;
  bool count_pads = false;
  Ints xs, ys;           // strides N, C, H, W of the image and of the pooled image
  std::int64_t run = 1;  // channels that lie side by side: c in NHWC, else 1
  int threads = 1;
};

/// `image`: the larger tensor. Both have the same layout.
Pool pool_of(const PlanContext& c, const SlotType& image, const SlotType& pooled) {
  CHECK(image.shape.size() == 4 && pooled.shape.size() == 4, "pooling is two-dimensional");
  const Ints k = c.integers("kernel_shape"), s = c.integers("strides"), p = c.integers("pads"),
             d = c.integers("dilations");
  Pool v;
  v.n = image.shape[0], v.c = image.shape[1], v.h = image.shape[2], v.w = image.shape[3];
  v.oh = pooled.shape[2], v.ow = pooled.shape[3];
  v.kh = k[0], v.kw = k[1], v.sh = s[0], v.sw = s[1], v.dh = d[0], v.dw = d[1];
  v.ph = p[0], v.pw = p[1], v.ph_end = p[2], v.pw_end = p[3];
  v.xs = image.strides(), v.ys = pooled.strides();
  v.run = image.layout == Layout::nhwc && pooled.layout == Layout::nhwc ? std::max<std::int64_t>(v.c, 1) : 1;
  v.threads = c.threads;
  return v;
}

/// Taps of a window that lie in the image: [first, last) of the kernel's positions.
struct Taps {
  std::int64_t first, last;
};
Taps taps(std::int64_t start, std::int64_t kernel, std::int64_t dilation, std::int64_t size) {
  const std::int64_t first = start < 0 ? (-start + dilation - 1) / dilation : 0;
  const std::int64_t last = std::min(kernel, start < size ? (size - start + dilation - 1) / dilation : 0);
  return {std::min(first, last), last};
}

/// Calls f(channel run's image pointer offset, pooled offset, vertical taps, horizontal taps, oy, ox) for
/// every window of the images [begin, end) of n (NHWC) or of n*c (dense).
template <class F>
void windows(const Pool& v, std::int64_t begin, std::int64_t end, const F& f) {
  const std::int64_t per = v.c / v.run;
  for (std::int64_t image = begin; image < end; ++image) {
    const std::int64_t x0 = image / per * v.xs[0] + image % per * v.xs[1];
    const std::int64_t y0 = image / per * v.ys[0] + image % per * v.ys[1];
    for (std::int64_t oy = 0; oy < v.oh; ++oy) {
      const std::int64_t y = oy * v.sh - v.ph;
      const Taps rows = taps(y, v.kh, v.dh, v.h);
      for (std::int64_t ox = 0; ox < v.ow; ++ox) {
        const std::int64_t x = ox * v.sw - v.pw;
        f(x0 + y * v.xs[2] + x * v.xs[3], y0 + oy * v.ys[2] + ox * v.ys[3], rows, taps(x, v.kw, v.dw, v.w), y,
          x);
      }
    }
  }
}
std::int64_t images(const Pool& v) { return v.n * (v.c / v.run); }
std::int64_t image_grain(const Pool& v) { return grain_of(v.run * v.oh * v.ow * v.kh * v.kw); }

/// Offset from the window's first tap to tap (i, j).
std::int64_t tap_offset(const Pool& v, std::int64_t i, std::int64_t j) {
  return i * v.dh * v.xs[2] + j * v.dw * v.xs[3];
}

/// Channels whose maxima stay in registers while a window is walked.
constexpr int kBlock = 16;

/// f(first channel, number of channels) over a run of channels; the number is a constant for all blocks but
/// the last.
template <class F>
void blocks(std::int64_t run, const F& f) {
  std::int64_t k = 0;
  for (; k + kBlock <= run; k += kBlock) f(k, std::integral_constant<int, kBlock>());
  if (k < run) f(k, static_cast<int>(run - k));
}

template <class T>
Run max_pool(const PlanContext& c) {
  const Pool v = pool_of(c, c.inputs[0], c.outputs[0]);
  return [v](const RunContext& r) {
    const T* in = r.in<T>(0);
    T* out = r.out<T>(0);
    parallel_for(v.threads, images(v), image_grain(v), [&](std::int64_t begin, std::int64_t end) {
      windows(v, begin, end,
              [&](std::int64_t x, std::int64_t y, Taps rows, Taps cols, std::int64_t, std::int64_t) {
                blocks(v.run, [&](std::int64_t channel, auto count) {
                  T most[kBlock];
                  std::fill(most, most + kBlock, -std::numeric_limits<T>::infinity());
                  for (std::int64_t i = rows.first; i < rows.last; ++i) {
                    for (std::int64_t j = cols.first; j < cols.last; ++j) {
                      const T* at = in + x + tap_offset(v, i, j) + channel;
#pragma omp simd
                      for (int k = 0; k < count; ++k)
                        most[k] = at[k] > most[k] || at[k] != at[k] ? at[k] : most[k];
                    }
                  }
                  std::copy(most, most + count, out + y + channel);
                });
              });
    });
  };
}

/// Adds dy to the first maximum of one window, for `count` channels.
template <class T, class Count>
void max_window_grad(const Pool& v, const T* in, const T* dy, T* dx, Taps rows, Taps cols, Count count) {
  T most[kBlock];
  std::int32_t where[kBlock];
  std::fill(most, most + kBlock, -std::numeric_limits<T>::infinity());
  std::fill(where, where + kBlock, -1);
  for (std::int64_t i = rows.first; i < rows.last; ++i) {
    for (std::int64_t j = cols.first; j < cols.last; ++j) {
      const T* at = in + tap_offset(v, i, j);
      const auto number = static_cast<std::int32_t>(i * v.kw + j);
#pragma omp simd
      for (int k = 0; k < count; ++k) {
        const bool better = at[k] > most[k] || at[k] != at[k] || where[k] < 0;
        most[k] = better ? at[k] : most[k];
        where[k] = better ? number : where[k];
      }
    }
  }
  for (std::int64_t i = rows.first; i < rows.last; ++i) {
    for (std::int64_t j = cols.first; j < cols.last; ++j) {
      T* at = dx + tap_offset(v, i, j);
      const auto number = static_cast<std::int32_t>(i * v.kw + j);
#pragma omp simd
      for (int k = 0; k < count; ++k) at[k] += where[k] == number ? dy[k] : T(0);
    }
  }
}

template <class T>
Run max_pool_grad(const PlanContext& c) {
  const Pool v = pool_of(c, c.inputs[1], c.inputs[0]);
  const std::int64_t numel = c.outputs[0].numel();
  return [=](const RunContext& r) {
    const T* dy = r.in<T>(0);
    const T* in = r.in<T>(1);
    T* dx = r.out<T>(0);
    std::fill(dx, dx + numel, T(0));
    parallel_for(v.threads, images(v), image_grain(v), [&](std::int64_t begin, std::int64_t end) {
      windows(v, begin, end,
              [&](std::int64_t x, std::int64_t y, Taps rows, Taps cols, std::int64_t, std::int64_t) {
                blocks(v.run, [&](std::int64_t k, auto count) {
                  max_window_grad(v, in + x + k, dy + y + k, dx + x + k, rows, cols, count);
                });
              });
    });
  };
}

/// Elements by which a window's sum is divided. With count_include_pad the padding counts, but not what
/// ceil_mode adds beyond it.
std::int64_t divisor(const Pool& v, Taps rows, Taps cols, std::int64_t y, std::int64_t x) {
  if (!v.count_pads) return (rows.last - rows.first) * (cols.last - cols.first);
  const Taps r = taps(y, v.kh, v.dh, v.h + v.ph_end), c = taps(x, v.kw, v.dw, v.w + v.pw_end);
  return r.last * c.last;
}

template <class T>
Run average_pool(const PlanContext& c) {
  Pool v = pool_of(c, c.inputs[0], c.outputs[0]);
  v.count_pads = c.flag("count_include_pad");
  return [v](const RunContext& r) {
    const T* in = r.in<T>(0);
    T* out = r.out<T>(0);
    parallel_for(v.threads, images(v), image_grain(v), [&](std::int64_t begin, std::int64_t end) {
      windows(v, begin, end,
              [&](std::int64_t x, std::int64_t y, Taps rows, Taps cols, std::int64_t top, std::int64_t left) {
                T* sum = out + y;
                std::fill(sum, sum + v.run, T(0));
                for (std::int64_t i = rows.first; i < rows.last; ++i) {
                  for (std::int64_t j = cols.first; j < cols.last; ++j) {
                    const T* at = in + x + tap_offset(v, i, j);
#pragma omp simd
                    for (std::int64_t k = 0; k < v.run; ++k) sum[k] += at[k];
                  }
                }
                const T scale =
                    T(1) / static_cast<T>(std::max<std::int64_t>(divisor(v, rows, cols, top, left), 1));
                for (std::int64_t k = 0; k < v.run; ++k) sum[k] *= scale;
              });
    });
  };
}

template <class T>
Run average_pool_grad(const PlanContext& c) {
  Pool v = pool_of(c, c.outputs[0], c.inputs[0]);
  v.count_pads = c.flag("count_include_pad");
  const std::int64_t numel = c.outputs[0].numel();
  return [=](const RunContext& r) {
    const T* dy = r.in<T>(0);
    T* dx = r.out<T>(0);
    std::fill(dx, dx + numel, T(0));
    parallel_for(v.threads, images(v), image_grain(v), [&](std::int64_t begin, std::int64_t end) {
      windows(v, begin, end,
              [&](std::int64_t x, std::int64_t y, Taps rows, Taps cols, std::int64_t top, std::int64_t left) {
                const T scale =
                    T(1) / static_cast<T>(std::max<std::int64_t>(divisor(v, rows, cols, top, left), 1));
                for (std::int64_t i = rows.first; i < rows.last; ++i) {
                  for (std::int64_t j = cols.first; j < cols.last; ++j) {
                    T* at = dx + x + tap_offset(v, i, j);
#pragma omp simd
                    for (std::int64_t k = 0; k < v.run; ++k) at[k] += dy[y + k] * scale;
                  }
                }
              });
    });
  };
}

/// All rank-4 operands in one layout: NHWC if one of them comes so.
LayoutChoice one_layout(const PlanContext& c) {
  const bool nhwc = std::any_of(c.inputs.begin(), c.inputs.end(),
                                [](const SlotType& t) { return t.layout == Layout::nhwc; });
  const Layout layout = nhwc ? Layout::nhwc : Layout::dense;
  return {std::vector<Layout>(c.inputs.size(), layout), {layout}};
}

}  // namespace

void add_pools(KernelTable& table) {
#define ONNXDDP_FLOAT(CALL)                                         \
  [](PlanContext& c) {                                              \
    return with_float(c.inputs[0].dtype, [&](auto element) -> Run { \
      using T = decltype(element);                                  \
      return CALL;                                                  \
    });                                                             \
  }
  add(table, {"MaxPool", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(max_pool<T>(c)), one_layout});
  add(table, {"MaxPoolGrad", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(max_pool_grad<T>(c)), one_layout});
  add(table, {"AveragePool", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(average_pool<T>(c)), one_layout});
  add(table,
      {"AveragePoolGrad", kFloats, LayoutRule::choose, ONNXDDP_FLOAT(average_pool_grad<T>(c)), one_layout});
#undef ONNXDDP_FLOAT
}

}  // namespace onnxddp::cpu

// Convolution: oneDNN for f32, plain loops for f64 and for what oneDNN refuses.
#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

struct Conv {
  std::int64_t n, c, h, w, k, oh, ow, kh, kw;
  std::int64_t sh, sw, ph, pw, dh, dw, group;
  Ints xs, ys, ws;  // strides of image, result and weight
  int threads = 1;
};

Conv conv_of(const PlanContext& c, const SlotType& x, const SlotType& w, const SlotType& y) {
  const Ints s = c.integers("strides"), p = c.integers("pads"), d = c.integers("dilations");
  return {x.shape[0], x.shape[1],         x.shape[2],  x.shape[3],  w.shape[0],  y.shape[2], y.shape[3],
          w.shape[2], w.shape[3],         s[0],        s[1],        p[0],        p[1],       d[0],
          d[1],       c.integer("group"), x.strides(), y.strides(), w.strides(), c.threads};
}

/// Calls f(image offset, weight offset, result offset) for every product of a convolution that contributes to
/// image n, output channel k and result row oy.
template <class F>
void products(const Conv& v, std::int64_t n, std::int64_t k, std::int64_t oy, const F& f) {
  const std::int64_t per = v.c / v.group, first = k / (v.k / v.group) * per;
  for (std::int64_t ox = 0; ox < v.ow; ++ox) {
    const std::int64_t y = n * v.ys[0] + k * v.ys[1] + oy * v.ys[2] + ox * v.ys[3];
    for (std::int64_t i = 0; i < v.kh; ++i) {
      const std::int64_t row = oy * v.sh - v.ph + i * v.dh;
      if (row < 0 || row >= v.h) continue;
      for (std::int64_t j = 0; j < v.kw; ++j) {
        const std::int64_t col = ox * v.sw - v.pw + j * v.dw;
        if (col < 0 || col >= v.w) continue;
        for (std::int64_t c = 0; c < per; ++c) {
          f(n * v.xs[0] + (first + c) * v.xs[1] + row * v.xs[2] + col * v.xs[3],
            k * v.ws[0] + c * v.ws[1] + i * v.ws[2] + j * v.ws[3], y);
        }
      }
    }
  }
}

template <class T>
void forward(const Conv& v, const T* x, const T* w, const T* b, T* y) {
  for (std::int64_t n = 0; n < v.n; ++n) {
    for (std::int64_t k = 0; k < v.k; ++k) {
      for (std::int64_t oy = 0; oy < v.oh; ++oy) {
        for (std::int64_t ox = 0; ox < v.ow; ++ox)
          y[n * v.ys[0] + k * v.ys[1] + oy * v.ys[2] + ox * v.ys[3]] = b ? b[k] : T(0);
        products(v, n, k, oy,
                 [&](std::int64_t xi, std::int64_t wi, std::int64_t yi) { y[yi] += x[xi] * w[wi]; });
      }
    }
  }
}

template <class T>
void data_grad(const Conv& v, const T* dy, const T* w, T* dx) {
  std::fill(dx, dx + v.n * v.c * v.h * v.w, T(0));
  parallel_for(v.threads, v.n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      for (std::int64_t k = 0; k < v.k; ++k) {
        for (std::int64_t oy = 0; oy < v.oh; ++oy) {
          products(v, n, k, oy,
                   [&](std::int64_t xi, std::int64_t wi, std::int64_t yi) { dx[xi] += dy[yi] * w[wi]; });
        }
      }
    }
  });
}

template <class T>
void weight_grad(const Conv& v, const T* dy, const T* x, T* dw) {
  std::fill(dw, dw + v.k * (v.c / v.group) * v.kh * v.kw, T(0));
  parallel_for(v.threads, v.k, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      for (std::int64_t n = 0; n < v.n; ++n) {
        for (std::int64_t oy = 0; oy < v.oh; ++oy) {
          products(v, n, k, oy,
                   [&](std::int64_t xi, std::int64_t wi, std::int64_t yi) { dw[wi] += dy[yi] * x[xi]; });
        }
      }
    }
  });
}

/// NHWC for images and results; weights stay dense.
LayoutChoice nhwc_images(const PlanContext& c, std::vector<bool> inputs, bool output) {
  LayoutChoice choice;
  for (std::size_t i = 0; i < c.inputs.size(); ++i)
    choice.inputs.push_back(i < inputs.size() && inputs[i] ? Layout::nhwc : Layout::dense);
  choice.outputs.assign(c.outputs.size(), output ? Layout::nhwc : Layout::dense);
  return choice;
}

using Prepare = Run (*)(PlanContext&);
using Reference = Run (*)(const PlanContext&);

/// oneDNN's run for f32, the reference where there is none.
std::function<Run(PlanContext&)> either(Prepare fast, Reference plain) {
  return [=](PlanContext& c) {
    if (c.inputs[0].dtype == DType::f32 && c.inputs[0].numel() != 0 && c.inputs[1].numel() != 0) {
      if (Run run = fast(c)) return run;
    }
    return plain(c);
  };
}

}  // namespace

Run reference_conv(const PlanContext& c) {
  const Conv v = conv_of(c, c.inputs[0], c.inputs[1], c.outputs[0]);
  const bool bias = c.has(2);
  return with_float(c.inputs[0].dtype, [&](auto element) -> Run {
    using T = decltype(element);
    return [=](const RunContext& r) {
      forward(v, r.in<T>(0), r.in<T>(1), bias ? r.in<T>(2) : nullptr, r.out<T>(0));
    };
  });
}

Run reference_conv_data_grad(const PlanContext& c) {
  const Conv v = conv_of(c, c.outputs[0], c.inputs[1], c.inputs[0]);
  return with_float(c.inputs[0].dtype, [&](auto element) -> Run {
    using T = decltype(element);
    return [=](const RunContext& r) { data_grad(v, r.in<T>(0), r.in<T>(1), r.out<T>(0)); };
  });
}

Run reference_conv_weight_grad(const PlanContext& c) {
  const Conv v = conv_of(c, c.inputs[1], c.outputs[0], c.inputs[0]);
  return with_float(c.inputs[0].dtype, [&](auto element) -> Run {
    using T = decltype(element);
    return [=](const RunContext& r) { weight_grad(v, r.in<T>(0), r.in<T>(1), r.out<T>(0)); };
  });
}

void add_convolutions(KernelTable& table) {
  add(table, {"Conv", kFloats, LayoutRule::choose, either(dnnl_conv, reference_conv),
              [](const PlanContext& c) { return nhwc_images(c, {true}, true); }});
  add(table,
      {"ConvDataGrad", kFloats, LayoutRule::choose, either(dnnl_conv_data_grad, reference_conv_data_grad),
       [](const PlanContext& c) { return nhwc_images(c, {true}, true); }});
  add(table, {"ConvWeightGrad", kFloats, LayoutRule::choose,
              either(dnnl_conv_weight_grad, reference_conv_weight_grad), [](const PlanContext& c) {
                return nhwc_images(c, {true, true}, false);
              }});
}

}  // namespace onnxddp::cpu

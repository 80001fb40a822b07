// Max and average pooling. The gradients gather: each image element looks for the windows that hold it.
#include "executor/cuda/device.h"
#include "executor/cuda/kernels.h"

namespace onnxddp::cuda {
namespace {

/// A Pool with the arithmetic that kernels need. Tensors are walked in memory order: dense [n, c, h, w] or
/// [n, h, w, c].
struct Shape {
  Pool p;
  Divider c, h, w, oh, ow;
  std::int64_t sc, sh, sw;  // strides of the image within an n
  std::int64_t yc, yh, yw;  // of the pooled tensor
};

Shape shape_of(const Pool& p) {
  Shape s{p, Divider(p.c), Divider(p.h), Divider(p.w), Divider(p.oh), Divider(p.ow), 1, p.w * p.c, p.c,
          1, p.ow * p.c,   p.c};
  if (!p.nhwc) s.sc = p.h * p.w, s.sh = p.w, s.sw = 1, s.yc = p.oh * p.ow, s.yh = p.ow, s.yw = 1;
  return s;
}

struct Place {
  std::int64_t n, c, y, x;
};
/// Coordinates of element i of a tensor with rows of w and planes of h rows.
__device__ inline Place place_of(const Shape& s, std::int64_t i, const Divider& h, const Divider& w) {
  Place at;
  if (s.p.nhwc) {
    at.c = s.c.split(i);
    at.x = w.split(i);
    at.y = h.split(i);
  } else {
    at.x = w.split(i);
    at.y = h.split(i);
    at.c = s.c.split(i);
  }
  at.n = i;
  return at;
}

/// Taps [first, last) of a window that lie in [0, size); the window begins at `start`.
struct Taps {
  int first, last;
};
__device__ inline Taps taps(std::int64_t start, int kernel, int dilation, std::int64_t size) {
  const std::int64_t skip = start < 0 ? (-start + dilation - 1) / dilation : 0;
  const std::int64_t fit = start < size ? (size - start + dilation - 1) / dilation : 0;
  const int last = fit < kernel ? static_cast<int>(fit) : kernel;
  return {skip < last ? static_cast<int>(skip) : last, last};
}

/// Windows [first, last] along one axis whose taps may touch position x: those that begin at or before x and
/// end at or after it.
struct Windows {
  std::int64_t first, last;
};
__device__ inline Windows windows_of(std::int64_t x, int pad, int kernel, int stride, int dilation,
                                     std::int64_t count) {
  const std::int64_t reach = x + pad - std::int64_t{kernel - 1} * dilation;
  const std::int64_t last = (x + pad) / stride;
  return {reach <= 0 ? 0 : (reach + stride - 1) / stride, last < count ? last : count - 1};
}

/// The pooled window at (oy, ox) of a plane.
struct Window {
  std::int64_t y, x;
  Taps rows, cols;
};
__device__ inline Window window_at(const Shape& s, std::int64_t oy, std::int64_t ox) {
  Window w;
  w.y = oy * s.p.sh - s.p.ph;
  w.x = ox * s.p.sw - s.p.pw;
  w.rows = taps(w.y, s.p.kh, s.p.dh, s.p.h);
  w.cols = taps(w.x, s.p.kw, s.p.dw, s.p.w);
  return w;
}

/// Elements by which a window's sum is divided. With count_include_pad the padding counts, but not what
/// ceil_mode adds beyond it.
__device__ inline float divisor(const Shape& s, const Window& w) {
  int n = (w.rows.last - w.rows.first) * (w.cols.last - w.cols.first);
  if (s.p.count_pads)
    n = taps(w.y, s.p.kh, s.p.dh, s.p.h + s.p.ph_end).last *
        taps(w.x, s.p.kw, s.p.dw, s.p.w + s.p.pw_end).last;
  return static_cast<float>(n < 1 ? 1 : n);
}

struct Most {
  float value;
  int tap;  // i * kw + j of the first maximum, -1 if the window holds padding only
};
template <class T>
__device__ inline Most most_of(const Shape& s, const T* plane, const Window& w) {
  Most most{-INFINITY, -1};
  for (int i = w.rows.first; i < w.rows.last; ++i) {
    for (int j = w.cols.first; j < w.cols.last; ++j) {
      const float value = load(plane[(w.y + i * s.p.dh) * s.sh + (w.x + j * s.p.dw) * s.sw]);
      if (value > most.value || value != value || most.tap < 0) most = {value, i * s.p.kw + j};
    }
  }
  return most;
}

template <class T>
__global__ void __launch_bounds__(kThreads) max_pool_kernel(Shape s, const T* x, T* y, std::int64_t count) {
  for (std::int64_t i = first_item(); i < count; i += item_step()) {
    const Place at = place_of(s, i, s.oh, s.ow);
    const T* plane = x + at.n * s.p.c * s.p.h * s.p.w + at.c * s.sc;
    y[i] = store<T>(most_of(s, plane, window_at(s, at.y, at.x)).value);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    average_pool_kernel(Shape s, const T* x, T* y, std::int64_t count) {
  for (std::int64_t i = first_item(); i < count; i += item_step()) {
    const Place at = place_of(s, i, s.oh, s.ow);
    const T* plane = x + at.n * s.p.c * s.p.h * s.p.w + at.c * s.sc;
    const Window w = window_at(s, at.y, at.x);
    float sum = 0;
    for (int r = w.rows.first; r < w.rows.last; ++r)
      for (int q = w.cols.first; q < w.cols.last; ++q)
        sum += load(plane[(w.y + r * s.p.dh) * s.sh + (w.x + q * s.p.dw) * s.sw]);
    y[i] = store<T>(sum / divisor(s, w));
  }
}

/// Sum over the windows that hold image element `at` of f(window, its tap there, index of the window's
/// output).
template <class F>
__device__ inline float gather_windows(const Shape& s, const Place& at, const F& f) {
  const Windows rows = windows_of(at.y, s.p.ph, s.p.kh, s.p.sh, s.p.dh, s.p.oh);
  const Windows cols = windows_of(at.x, s.p.pw, s.p.kw, s.p.sw, s.p.dw, s.p.ow);
  const std::int64_t plane = at.n * s.p.c * s.p.oh * s.p.ow + at.c * s.yc;
  float sum = 0;
  for (std::int64_t oy = rows.first; oy <= rows.last; ++oy) {
    const int dy = static_cast<int>(at.y + s.p.ph - oy * s.p.sh);
    if (dy % s.p.dh != 0) continue;
    for (std::int64_t ox = cols.first; ox <= cols.last; ++ox) {
      const int dx = static_cast<int>(at.x + s.p.pw - ox * s.p.sw);
      if (dx % s.p.dw != 0) continue;
      sum += f(window_at(s, oy, ox), dy / s.p.dh * s.p.kw + dx / s.p.dw, plane + oy * s.yh + ox * s.yw);
    }
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    max_pool_grad_kernel(Shape s, const T* dy, const T* x, T* dx, std::int64_t count) {
  for (std::int64_t i = first_item(); i < count; i += item_step()) {
    const Place at = place_of(s, i, s.h, s.w);
    const T* plane = x + at.n * s.p.c * s.p.h * s.p.w + at.c * s.sc;
    dx[i] = store<T>(gather_windows(s, at, [&](const Window& w, int tap, std::int64_t output) {
      return most_of(s, plane, w).tap == tap ? load(dy[output]) : 0.0f;
    }));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    average_pool_grad_kernel(Shape s, const T* dy, T* dx, std::int64_t count) {
  for (std::int64_t i = first_item(); i < count; i += item_step()) {
    const Place at = place_of(s, i, s.h, s.w);
    dx[i] = store<T>(gather_windows(
        s, at, [&](const Window& w, int, std::int64_t output) { return load(dy[output]) / divisor(s, w); }));
  }
}

std::int64_t image_size(const Pool& p) { return p.n * p.c * p.h * p.w; }
std::int64_t pooled_size(const Pool& p) { return p.n * p.c * p.oh * p.ow; }

}  // namespace

void max_pool(DType dtype, const Pool& p, const void* in, void* out, cudaStream_t stream) {
  const std::int64_t n = pooled_size(p);
  with_float("max_pool", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    T* y = static_cast<T*>(out);
    launch("max_pool", max_pool_kernel<T>, grid_for(n), dim3(kThreads), 0, stream,
           {reads(x, image_size(p)), writes(y, n)}, shape_of(p), x, y, n);
  });
}

void average_pool(DType dtype, const Pool& p, const void* in, void* out, cudaStream_t stream) {
  const std::int64_t n = pooled_size(p);
  with_float("average_pool", dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(in);
    T* y = static_cast<T*>(out);
    launch("average_pool", average_pool_kernel<T>, grid_for(n), dim3(kThreads), 0, stream,
           {reads(x, image_size(p)), writes(y, n)}, shape_of(p), x, y, n);
  });
}

void max_pool_grad(DType dtype, const Pool& p, const void* dy_in, const void* in, void* out,
                   cudaStream_t stream) {
  const std::int64_t n = image_size(p);
  with_float("max_pool_grad", dtype, [&](auto element) {
    using T = decltype(element);
    const T* dy = static_cast<const T*>(dy_in);
    const T* x = static_cast<const T*>(in);
    T* dx = static_cast<T*>(out);
    launch("max_pool_grad", max_pool_grad_kernel<T>, grid_for(n), dim3(kThreads), 0, stream,
           {reads(dy, pooled_size(p)), reads(x, n), writes(dx, n)}, shape_of(p), dy, x, dx, n);
  });
}

void average_pool_grad(DType dtype, const Pool& p, const void* dy_in, void* out, cudaStream_t stream) {
  const std::int64_t n = image_size(p);
  with_float("average_pool_grad", dtype, [&](auto element) {
    using T = decltype(element);
    const T* dy = static_cast<const T*>(dy_in);
    T* dx = static_cast<T*>(out);
    launch("average_pool_grad", average_pool_grad_kernel<T>, grid_for(n), dim3(kThreads), 0, stream,
           {reads(dy, pooled_size(p)), writes(dx, n)}, shape_of(p), dy, dx, n);
  });
}

}  // namespace onnxddp::cuda

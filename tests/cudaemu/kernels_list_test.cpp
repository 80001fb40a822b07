// Kernels over lists of tensors: SGD, Adam, AdamW, norms of gradients, scaling, the non-finite flag.
#include <cstring>
#include <memory>

#include "tests/cudaemu/kernels_testing.h"

namespace cudaemu_test {
namespace {

namespace cuda = onnxddp::cuda;

class ListKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Schedules, ListKernels, schedules());

/// A list with its tables on the device.
template <class Entry>
class Uploaded {
 public:
  Uploaded(const std::vector<Entry>& tensors, cudaStream_t stream)
      : tensors_(tensors, stream), chunks_(cuda::chunks_of(tensors), stream) {
    list.tensors = tensors;
    list.chunks = cuda::chunks_of(tensors);
    list.device_tensors = tensors_.get();
    list.device_chunks = chunks_.get();
  }
  cuda::DeviceList<Entry> list;

 private:
  Buffer<Entry> tensors_;
  Buffer<cuda::Chunk> chunks_;
};

/// One parameter with its state on the device and on the host.
struct Parameter {
  Doubles p, g, m, v, vmax;
  std::unique_ptr<Tensor> device_p, device_g, device_m, device_v, device_vmax, hyper;
};
const std::int64_t kSizes[] = {5, 1, 0, 8, 8195};

std::vector<Parameter> parameters(std::vector<Doubles> values, std::vector<Doubles> gradients, DType p,
                                  DType g, const Doubles& hyper, bool aligned, cudaStream_t stream) {
  std::vector<Parameter> all;
  for (std::size_t i = 0; i < values.size(); ++i) {
    Parameter one;
    const std::int64_t shift = aligned ? 0 : 1;
    const auto make = [&](DType dtype, const Doubles& x) {
      return std::make_unique<Tensor>(dtype, x, shift, stream);
    };
    one.p = values[i];
    one.g = gradients[i];
    one.m = one.v = one.vmax = Doubles(values[i].size(), 0.25);
    one.device_p = make(p, one.p);
    one.device_g = make(g, one.g);
    one.device_m = make(DType::f32, one.m);
    one.device_v = make(DType::f32, one.v);
    one.device_vmax = make(DType::f32, one.vmax);
    Doubles own = hyper;
    own[0] *= static_cast<double>(i + 1);  // every tensor may have numbers of its own
    one.hyper = std::make_unique<Tensor>(DType::f64, own, 0, stream);
    all.push_back(std::move(one));
  }
  return all;
}

enum class Method { sgd, momentum, nesterov, adam, adamw, amsgrad };

cuda::UpdateEntry entry_of(const Parameter& x, Method method) {
  cuda::UpdateEntry e{};
  e.p = x.device_p->get();
  e.p_next = x.device_p->get();
  e.g = x.device_g->get();
  e.hyper = x.hyper->as<double>();
  e.n = static_cast<std::int64_t>(x.p.size());
  if (method != Method::sgd) e.m = e.m_next = x.device_m->as<float>();
  if (method >= Method::adam) e.v = e.v_next = x.device_v->as<float>();
  if (method == Method::amsgrad) e.vmax = e.vmax_next = x.device_vmax->as<float>();
  return e;
}

/// One step of PyTorch's formulas in double.
void reference_step(Parameter& x, Method method, const Doubles& h, double scale) {
  for (std::size_t i = 0; i < x.p.size(); ++i) {
    double g = x.g[i] * scale;
    double& p = x.p[i];
    if (method < Method::adam) {
      g += h[4] * p;
      if (method != Method::sgd) x.m[i] = h[1] <= 1 ? g : h[2] * x.m[i] + (1 - h[3]) * g;
      p -= h[0] * (method == Method::sgd ? g : method == Method::nesterov ? g + h[2] * x.m[i] : x.m[i]);
      continue;
    }
    if (method == Method::adamw)
      p *= 1 - h[0] * h[5];
    else
      g += h[5] * p;
    x.m[i] = h[2] * x.m[i] + (1 - h[2]) * g;
    x.v[i] = h[3] * x.v[i] + (1 - h[3]) * g * g;
    x.vmax[i] = std::max(x.vmax[i], x.v[i]);
    const double second = method == Method::amsgrad ? x.vmax[i] : x.v[i];
    p -= h[0] / (1 - std::pow(h[2], h[1])) * x.m[i] /
         (std::sqrt(second) / std::sqrt(1 - std::pow(h[3], h[1])) + h[4]);
  }
}

TEST_P(ListKernels, OptimizersFollowPyTorchsFormulas) {
  struct Types {
    DType p, g;
    bool aligned;
  };
  for (Method method :
       {Method::sgd, Method::momentum, Method::nesterov, Method::adam, Method::adamw, Method::amsgrad}) {
    for (const Types& types : {Types{DType::f32, DType::f32, true},
                               {DType::f32, DType::f32, false},
                               {DType::f32, DType::bf16, true},
                               {DType::bf16, DType::bf16, true}}) {
      const bool adam = method >= Method::adam, clipped = types.g == DType::bf16;
      const double step = types.aligned ? 3 : 1;
      const Doubles hyper =
          adam ? Doubles{0.01, step, 0.9, 0.99, 1e-6, 0.1} : Doubles{0.01, step, 0.9, 0.3, 0.1};
      std::vector<Doubles> values, gradients;
      for (std::int64_t n : kSizes) {
        if (n > 100 && (method == Method::sgd || types.p == DType::bf16)) continue;
        values.push_back(random(types.p, n));
        gradients.push_back(random(types.g, n));
      }
      auto all = parameters(values, gradients, types.p, types.g, hyper, types.aligned, stream_);
      std::vector<cuda::UpdateEntry> entries;
      for (const Parameter& x : all) entries.push_back(entry_of(x, method));
      const Uploaded<cuda::UpdateEntry> uploaded(entries, stream_);
      const Tensor factor(DType::f32, {0.5}, 0, stream_);
      const float* scale = clipped ? factor.as<float>() : nullptr;
      if (adam)
        cuda::adam(uploaded.list, types.p, types.g, method == Method::adamw, scale, stream_);
      else
        cuda::sgd(uploaded.list, types.p, types.g, method == Method::nesterov, scale, stream_);
      for (std::size_t i = 0; i < all.size(); ++i) {
        Doubles own = hyper;
        own[0] *= static_cast<double>(i + 1);
        Parameter& x = all[i];
        reference_step(x, method, own, clipped ? 0.5 : 1);
        EXPECT_TRUE(near(types.p, x.device_p->read(stream_), x.p)) << "method " << static_cast<int>(method);
        if (method != Method::sgd) {
          EXPECT_TRUE(near(DType::f32, x.device_m->read(stream_), x.m));
        }
        if (adam) {
          EXPECT_TRUE(near(DType::f32, x.device_v->read(stream_), x.v));
        }
        if (method == Method::amsgrad) {
          EXPECT_TRUE(near(DType::f32, x.device_vmax->read(stream_), x.vmax));
        }
      }
    }
  }
}

TEST_P(ListKernels, SumSquaresScaleAndFlag) {
  for (DType dtype : kFloats) {
    std::vector<std::unique_ptr<Tensor>> inputs, outputs;
    std::vector<cuda::ListEntry> entries;
    std::vector<Doubles> values;
    double expected = 0;
    for (std::int64_t n : kSizes) {
      const std::int64_t shift = n % 2;
      values.push_back(random(dtype, n));
      for (double x : values.back()) expected += x * x;
      inputs.push_back(std::make_unique<Tensor>(dtype, values.back(), shift, stream_));
      outputs.push_back(std::make_unique<Tensor>(dtype, n, shift));
      entries.push_back({inputs.back()->get(), outputs.back()->get(), n});
    }
    const Uploaded<cuda::ListEntry> uploaded(entries, stream_);
    const Scratch scratch(cuda::sum_squares_scratch_bytes(uploaded.list));
    for (DType to : {DType::f64, DType::f32, DType::bf16}) {
      const Tensor y(to, 1);
      cuda::sum_squares(uploaded.list, dtype, to, y.get(), scratch.get(), stream_);
      EXPECT_TRUE(near(to, y.read(stream_), {expected}));
    }
    const Tensor factor(DType::f32, {-0.75}, 0, stream_), flag(DType::i32, 1);
    cuda::scale(uploaded.list, dtype, factor.as<float>(), stream_);
    for (std::size_t i = 0; i < values.size(); ++i) {
      for (double& x : values[i]) x *= -0.75;
      EXPECT_TRUE(near(dtype, outputs[i]->read(stream_), values[i]));
    }
    cuda::find_non_finite(uploaded.list, dtype, flag.as<unsigned>(), stream_);
    EXPECT_EQ(flag.read(stream_), Doubles{0});
    for (double bad : {static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
      values[3].back() = bad;
      inputs[3]->set(values[3], stream_);
      cuda::find_non_finite(uploaded.list, dtype, flag.as<unsigned>(), stream_);
      EXPECT_EQ(flag.read(stream_), Doubles{1});
    }
  }
}

TEST_P(ListKernels, EmptyLists) {
  const Uploaded<cuda::ListEntry> nothing(std::vector<cuda::ListEntry>{}, stream_);
  const Tensor y(DType::f32, 1), flag(DType::i32, 1);
  const Scratch scratch(cuda::sum_squares_scratch_bytes(nothing.list));
  cuda::sum_squares(nothing.list, DType::f32, DType::f32, y.get(), scratch.get(), stream_);
  EXPECT_EQ(y.read(stream_), Doubles{0});
  cuda::find_non_finite(nothing.list, DType::f32, flag.as<unsigned>(), stream_);
  EXPECT_EQ(flag.read(stream_), Doubles{0});
}

}  // namespace
}  // namespace cudaemu_test

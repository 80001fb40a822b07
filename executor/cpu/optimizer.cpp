// Parameter updates in one pass over parameter, gradient and state.
#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"
#include "executor/scalar_ops.h"

namespace onnxddp::cpu {
namespace {

template <class T>
Run sgd(const PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel();
  const bool nesterov = c.flag("nesterov"), momentum = c.has(3);
  return [=, threads = c.threads](const RunContext& r) {
    const auto f = scalar::Sgd<T>::from(r.in<double>(2), nesterov);
    const T* p = r.in<T>(0);
    const T* g = r.in<T>(1);
    const T* v = momentum ? r.in<T>(3) : nullptr;
    T* next = r.out<T>(0);
    T* next_v = momentum ? r.out<T>(1) : nullptr;
    parallel_for(threads, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      const auto local = f;
      if (!momentum) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i) next[i] = local(p[i], g[i]);
        return;
      }
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        T velocity = v[i];
        next[i] = local(p[i], g[i], velocity);
        next_v[i] = velocity;
      }
    });
  };
}

template <class T>
Run adam(const PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel();
  const bool decoupled = c.flag("decoupled"), amsgrad = c.has(5);
  return [=, threads = c.threads](const RunContext& r) {
    const auto f = scalar::Adam<T>::from(r.in<double>(2), decoupled);
    const T* p = r.in<T>(0);
    const T* g = r.in<T>(1);
    const T* m = r.in<T>(3);
    const T* v = r.in<T>(4);
    T* next = r.out<T>(0);
    T* next_m = r.out<T>(1);
    T* next_v = r.out<T>(2);
    parallel_for(threads, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      const auto local = f;
      if (!amsgrad) {
#pragma omp simd
        for (std::int64_t i = begin; i < end; ++i) {
          const T old = p[i];
          T mean = m[i], square = v[i];
          local.moments(old, g[i], mean, square);
          next_m[i] = mean;
          next_v[i] = square;
          next[i] = local.step(old, mean, square);
        }
        return;
      }
      const T* most = r.in<T>(5);
      T* next_most = r.out<T>(3);
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        const T old = p[i];
        T mean = m[i], square = v[i];
        local.moments(old, g[i], mean, square);
        const T largest = most[i] > square ? most[i] : square;
        next_m[i] = mean;
        next_v[i] = square;
        next_most[i] = largest;
        next[i] = local.step(old, mean, largest);
      }
    });
  };
}

}  // namespace

void add_optimizers(KernelTable& table) {
  add(table, {"SgdUpdate", kFloats, LayoutRule::dense, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype, [&](auto element) { return sgd<decltype(element)>(c); });
              }});
  add(table, {"AdamUpdate", kFloats, LayoutRule::dense, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype,
                                  [&](auto element) { return adam<decltype(element)>(c); });
              }});
}

}  // namespace onnxddp::cpu

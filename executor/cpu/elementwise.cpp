// Elementwise kernels: the functors of scalar_ops.h over broadcast loops.
#include "executor/scalar_ops.h"

#include <limits>

#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

template <class In, class Out, class F>
void unary_row(const In* x, Out* y, std::int64_t n, std::int64_t sx, std::int64_t sy, const F& f) {
  if (sx == 1 && sy == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i * sy] = f(x[i * sx]);
  }
}

template <class In, class Out, class F>
void binary_row(const In* a, const In* b, Out* y, std::int64_t n, std::int64_t sa, std::int64_t sb, std::int64_t sy,
                const F& f) {
  if (sy == 1 && sa == 1 && sb == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(a[i], b[i]);
  } else if (sy == 1 && sa == 1 && sb == 0) {
    const In right = *b;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(a[i], right);
  } else if (sy == 1 && sa == 0 && sb == 1) {
    const In left = *a;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(left, b[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i * sy] = f(a[i * sa], b[i * sb]);
  }
}

template <class In, class Out, class F>
Run unary(const PlanContext& c, F f) {
  Nest<2> nest = elementwise_nest<1>(c.outputs[0], {&c.inputs[0]});
  const auto inner = nest.take_inner();
  const std::int64_t rows = nest.count();
  const int threads = c.threads;
  if (rows == 1) {  // contiguous: the usual case
    return [=](const RunContext& r) {
      const In* x = r.in<In>(0);
      Out* y = r.out<Out>(0);
      parallel_for(threads, inner.size, kGrain, [&](std::int64_t b, std::int64_t e) {
        unary_row(x + b * inner.stride[1], y + b * inner.stride[0], e - b, inner.stride[1], inner.stride[0], f);
      });
    };
  }
  return [=](const RunContext& r) {
    const In* x = r.in<In>(0);
    Out* y = r.out<Out>(0);
    parallel_for(threads, rows, grain_of(inner.size), [&](std::int64_t b, std::int64_t e) {
      nest.each(b, e, [&](const auto& at) {
        unary_row(x + at[1], y + at[0], inner.size, inner.stride[1], inner.stride[0], f);
      });
    });
  };
}

template <class In, class Out, class F>
Run binary(const PlanContext& c, F f) {
  Nest<3> nest = elementwise_nest<2>(c.outputs[0], {&c.inputs[0], &c.inputs[1]});
  const auto inner = nest.take_inner();
  const std::int64_t rows = nest.count();
  const int threads = c.threads;
  const auto [sy, sa, sb] = inner.stride;
  return [=, sy = sy, sa = sa, sb = sb](const RunContext& r) {
    const In* a = r.in<In>(0);
    const In* b = r.in<In>(1);
    Out* y = r.out<Out>(0);
    if (rows == 1) {
      parallel_for(threads, inner.size, kGrain, [&](std::int64_t begin, std::int64_t end) {
        binary_row(a + begin * sa, b + begin * sb, y + begin * sy, end - begin, sa, sb, sy, f);
      });
      return;
    }
    parallel_for(threads, rows, grain_of(inner.size), [&](std::int64_t begin, std::int64_t end) {
      nest.each(begin, end, [&](const auto& at) { binary_row(a + at[1], b + at[2], y + at[0], inner.size, sa, sb, sy, f); });
    });
  };
}

template <class T>
Run where(const PlanContext& c) {
  Nest<4> nest = elementwise_nest<3>(c.outputs[0], {&c.inputs[0], &c.inputs[1], &c.inputs[2]});
  const auto inner = nest.take_inner();
  const int threads = c.threads;
  return [=](const RunContext& r) {
    const bool* condition = r.in<bool>(0);
    const T* a = r.in<T>(1);
    const T* b = r.in<T>(2);
    T* y = r.out<T>(0);
    parallel_for(threads, nest.count(), grain_of(inner.size), [&](std::int64_t begin, std::int64_t end) {
      nest.each(begin, end, [&](const auto& at) {
        const auto [sy, sc, sa, sb] = inner.stride;
        for (std::int64_t i = 0; i < inner.size; ++i) {
          y[at[0] + i * sy] = condition[at[1] + i * sc] ? a[at[2] + i * sa] : b[at[3] + i * sb];
        }
      });
    });
  };
}

/// Float to integer truncates; values that do not fit (NaN too) become the nearest limit, NaN 0. Anything to bool: != 0.
template <class To>
struct CastTo {
  template <class From>
  To operator()(From x) const {
    if constexpr (std::is_same_v<To, bool>) {
      return x != From(0);
    } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
      constexpr From low = static_cast<From>(std::numeric_limits<To>::min());
      constexpr From high = static_cast<From>(std::numeric_limits<To>::max());
      if (!(x == x)) return 0;
      if (x <= low) return std::numeric_limits<To>::min();
      return x >= high ? std::numeric_limits<To>::max() : static_cast<To>(x);
    } else {
      return static_cast<To>(x);
    }
  }
};

template <class F>
Run with_castable(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(float());
    case DType::f64: return f(double());
    case DType::i8: return f(std::int8_t());
    case DType::i16: return f(std::int16_t());
    case DType::i32: return f(std::int32_t());
    case DType::i64: return f(std::int64_t());
    case DType::u8: return f(std::uint8_t());
    case DType::boolean: return f(bool());
    default: throw Error(cat("Cast: the CPU has no kernel for ", dtype_name(dtype)));
  }
}

Run prepare_cast(PlanContext& c) {
  const DType to = c.outputs[0].dtype;
  return with_castable(c.inputs[0].dtype, [&](auto from) {
    using From = decltype(from);
    return with_castable(to, [&](auto target) {
      using To = decltype(target);
      return unary<From, To>(c, CastTo<To>());
    });
  });
}

/// Identity of every type, and Copy, which differs in the planner's eyes only.
Run prepare_copy(PlanContext& c) {
  return with_width(c.inputs[0].dtype, [&](auto element) {
    using T = decltype(element);
    return unary<T, T>(c, [](T x) { return x; });
  });
}

template <class F>
void add_unary(KernelTable& table, const char* op, const std::vector<DType>& dtypes) {
  add(table, {op, dtypes, LayoutRule::follow, [](PlanContext& c) {
                return with_number(c.inputs[0].dtype, [&](auto element) -> Run {
                  using T = decltype(element);
                  return unary<T, T>(c, F());
                });
              }});
}
template <class F>
void add_float_unary(KernelTable& table, const char* op) {
  add(table, {op, kFloats, LayoutRule::follow, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype, [&](auto element) -> Run {
                  using T = decltype(element);
                  return unary<T, T>(c, F());
                });
              }});
}
template <class F>
void add_binary(KernelTable& table, const char* op) {
  add(table, {op, kNumbers, LayoutRule::follow, [](PlanContext& c) {
                return with_number(c.inputs[0].dtype, [&](auto element) -> Run {
                  using T = decltype(element);
                  return binary<T, T>(c, F());
                });
              }});
}
template <class F>
void add_compare(KernelTable& table, const char* op) {
  std::vector<DType> dtypes = kNumbers;
  dtypes.push_back(DType::boolean);
  add(table, {op, dtypes, LayoutRule::follow, [](PlanContext& c) -> Run {
                if (c.inputs[0].dtype == DType::boolean) return binary<bool, bool>(c, F());
                return with_number(c.inputs[0].dtype, [&](auto element) -> Run {
                  return binary<decltype(element), bool>(c, F());
                });
              }});
}

template <template <class> class F>
void add_clip(KernelTable& table, const char* op) {
  add(table, {op, kFloats, LayoutRule::follow, [](PlanContext& c) {
                const F<double> f{c.number("min"), c.number("max")};
                return with_float(c.inputs[0].dtype, [&](auto element) -> Run {
                  using T = decltype(element);
                  return unary<T, T>(c, F<T>{static_cast<T>(f.min), static_cast<T>(f.max)});
                });
              }});
}

/// x^2, x^0.5 … with one exponent for all are common in exported models; the rest goes through pow.
template <class T>
Run prepare_pow(PlanContext& c) {
  Run general = binary<T, T>(c, scalar::Pow());
  if (c.inputs[1].numel() != 1) return general;
  Run square = unary<T, T>(c, [](T x) { return x * x; });
  return [=](const RunContext& r) { (*r.in<T>(1) == T(2) ? square : general)(r); };
}

}  // namespace

void add_elementwise(KernelTable& table) {
#define ONNXDDP_ADD(NAME) add_float_unary<scalar::NAME>(table, #NAME);
  ONNXDDP_UNARY_FLOAT_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add_unary<scalar::NAME>(table, #NAME, kNumbers);
  ONNXDDP_UNARY_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add_binary<scalar::NAME>(table, #NAME);
  ONNXDDP_BINARY_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) add_compare<scalar::NAME>(table, #NAME);
  ONNXDDP_COMPARE_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
#define ONNXDDP_ADD(NAME) \
  add(table, {#NAME, {DType::boolean}, LayoutRule::follow, [](PlanContext& c) { return binary<bool, bool>(c, scalar::NAME()); }});
  ONNXDDP_LOGIC_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
  add(table, {"Not", {DType::boolean}, LayoutRule::follow, [](PlanContext& c) { return unary<bool, bool>(c, scalar::Not()); }});
  add(table, {"Pow", kFloats, LayoutRule::follow, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype, [&](auto element) { return prepare_pow<decltype(element)>(c); });
              }});
  add_clip<scalar::Clip>(table, "Clip");
  add_clip<scalar::ClipMask>(table, "ClipMask");
  add(table, {"Where", {}, LayoutRule::follow, [](PlanContext& c) {
                return with_width(c.inputs[1].dtype, [&](auto element) { return where<decltype(element)>(c); });
              }});
  add(table, {"Cast", {}, LayoutRule::follow, prepare_cast});
  add(table, {"Identity", {}, LayoutRule::follow, prepare_copy});
  add(table, {"Copy", {}, LayoutRule::follow, prepare_copy});
}

}  // namespace onnxddp::cpu

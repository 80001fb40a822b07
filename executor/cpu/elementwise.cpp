// Elementwise kernels: the functors of scalar_ops.h over broadcast loops.
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"
#include "executor/scalar_ops.h"

namespace onnxddp::cpu {
namespace {

/// A functor's value, small and trivially copyable, behind a plain row function: the loops over a nest are
/// compiled once, and each function of each type adds one inner loop only.
struct State {
  alignas(8) std::array<std::byte, 16> bytes{};
  template <class F>
  static State of(const F& f) {
    static_assert(std::is_trivially_copyable_v<F> && sizeof(F) <= 16);
    State state;
    std::memcpy(state.bytes.data(), &f, sizeof(F));
    return state;
  }
};
using UnaryRow = void (*)(const State&, const void*, void*, std::int64_t n, std::int64_t sx, std::int64_t sy);
using BinaryRow = void (*)(const State&, const void*, const void*, void*, std::int64_t n, std::int64_t sa,
                           std::int64_t sb, std::int64_t sy);

template <class In, class Out, class F>
void unary_row(const State& state, const void* in, void* out, std::int64_t n, std::int64_t sx,
               std::int64_t sy) {
  F f{};
  std::memcpy(&f, state.bytes.data(), sizeof(F));
  const In* x = static_cast<const In*>(in);
  Out* y = static_cast<Out*>(out);
  if (sx == 1 && sy == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i * sy] = f(x[i * sx]);
  }
}

template <class In, class Out, class F>
void binary_row(const State& /*state*/, const void* left, const void* right, void* out, std::int64_t n,
                std::int64_t sa, std::int64_t sb, std::int64_t sy) {
  const F f{};
  const In* a = static_cast<const In*>(left);
  const In* b = static_cast<const In*>(right);
  Out* y = static_cast<Out*>(out);
  if (sy == 1 && sa == 1 && sb == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(a[i], b[i]);
  } else if (sy == 1 && sa == 1 && sb == 0) {
    const In second = *b;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(a[i], second);
  } else if (sy == 1 && sa == 0 && sb == 1) {
    const In first = *a;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) y[i] = f(first, b[i]);
  } else {
    for (std::int64_t i = 0; i < n; ++i) y[i * sy] = f(a[i * sa], b[i * sb]);
  }
}

/// Element strides as byte strides, so that the nest need not know the types.
template <std::size_t K>
void to_bytes(Nest<K>& nest, const std::array<std::int64_t, K>& sizes) {
  for (auto& axis : nest.axes)
    for (std::size_t k = 0; k < K; ++k) axis.stride[k] *= sizes[k];
}
std::int64_t size_of(const SlotType& type) { return static_cast<std::int64_t>(dtype_size(type.dtype)); }
const std::byte* at_byte(const void* p, std::int64_t offset) {
  return static_cast<const std::byte*>(p) + offset;
}
std::byte* at_byte(void* p, std::int64_t offset) { return static_cast<std::byte*>(p) + offset; }

Run run_unary(const PlanContext& c, UnaryRow row, const State& state) {
  Nest<2> nest = elementwise_nest<1>(c.outputs[0], {&c.inputs[0]});
  const auto inner = nest.take_inner();
  const std::int64_t ny = size_of(c.outputs[0]), nx = size_of(c.inputs[0]);
  to_bytes(nest, {ny, nx});
  const std::int64_t rows = nest.count();
  const int threads = c.threads;
  const auto [sy, sx] = inner.stride;
  return [=, sy = sy, sx = sx, n = inner.size](const RunContext& r) {
    if (rows == 1) {  // contiguous: the usual case
      parallel_for(threads, n, kGrain, [&](std::int64_t b, std::int64_t e) {
        row(state, at_byte(r.inputs[0], b * sx * nx), at_byte(r.outputs[0], b * sy * ny), e - b, sx, sy);
      });
      return;
    }
    parallel_for(threads, rows, grain_of(n), [&](std::int64_t b, std::int64_t e) {
      nest.each(b, e, [&](const auto& at) {
        row(state, at_byte(r.inputs[0], at[1]), at_byte(r.outputs[0], at[0]), n, sx, sy);
      });
    });
  };
}

Run run_binary(const PlanContext& c, BinaryRow row, const State& state) {
  Nest<3> nest = elementwise_nest<2>(c.outputs[0], {&c.inputs[0], &c.inputs[1]});
  const auto inner = nest.take_inner();
  const std::int64_t ny = size_of(c.outputs[0]), nx = size_of(c.inputs[0]);
  to_bytes(nest, {ny, nx, nx});
  const std::int64_t rows = nest.count();
  const int threads = c.threads;
  const auto [sy, sa, sb] = inner.stride;
  return [=, sy = sy, sa = sa, sb = sb, n = inner.size](const RunContext& r) {
    if (rows == 1) {
      parallel_for(threads, n, kGrain, [&](std::int64_t b, std::int64_t e) {
        row(state, at_byte(r.inputs[0], b * sa * nx), at_byte(r.inputs[1], b * sb * nx),
            at_byte(r.outputs[0], b * sy * ny), e - b, sa, sb, sy);
      });
      return;
    }
    parallel_for(threads, rows, grain_of(n), [&](std::int64_t b, std::int64_t e) {
      nest.each(b, e, [&](const auto& at) {
        row(state, at_byte(r.inputs[0], at[1]), at_byte(r.inputs[1], at[2]), at_byte(r.outputs[0], at[0]), n,
            sa, sb, sy);
      });
    });
  };
}

template <class In, class Out, class F>
Run unary(const PlanContext& c, const F& f) {
  return run_unary(c, unary_row<In, Out, F>, State::of(f));
}
template <class In, class Out, class F>
Run binary(const PlanContext& c, const F& f) {
  return run_binary(c, binary_row<In, Out, F>, State::of(f));
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

/// Float to integer truncates; values that do not fit (NaN too) become the nearest limit, NaN 0. Anything to
/// bool: != 0.
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

struct Same {
  template <class T>
  T operator()(T x) const {
    return x;
  }
};

/// Identity of every type, and Copy, which differs in the planner's eyes only.
Run prepare_copy(PlanContext& c) {
  return with_width(c.inputs[0].dtype, [&](auto element) {
    using T = decltype(element);
    return unary<T, T>(c, Same());
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

struct Square {
  template <class T>
  T operator()(T x) const {
    return x * x;
  }
};

/// x^2, x^0.5 … with one exponent for all are common in exported models; the rest goes through pow.
template <class T>
Run prepare_pow(PlanContext& c) {
  Run general = binary<T, T>(c, scalar::Pow());
  if (c.inputs[1].numel() != 1) return general;
  Run square = unary<T, T>(c, Square());
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
#define ONNXDDP_ADD(NAME)                                                       \
  add(table, {#NAME, {DType::boolean}, LayoutRule::follow, [](PlanContext& c) { \
                return binary<bool, bool>(c, scalar::NAME());                   \
              }});
  ONNXDDP_LOGIC_OPS(ONNXDDP_ADD)
#undef ONNXDDP_ADD
  add(table, {"Not", {DType::boolean}, LayoutRule::follow, [](PlanContext& c) {
                return unary<bool, bool>(c, scalar::Not());
              }});
  add(table, {"Pow", kFloats, LayoutRule::follow, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype,
                                  [&](auto element) { return prepare_pow<decltype(element)>(c); });
              }});
  add_clip<scalar::Clip>(table, "Clip");
  add_clip<scalar::ClipMask>(table, "ClipMask");
  add(table, {"Where", {}, LayoutRule::follow, [](PlanContext& c) {
                return with_width(c.inputs[1].dtype,
                                  [&](auto element) { return where<decltype(element)>(c); });
              }});
  add(table, {"Cast", {}, LayoutRule::follow, prepare_cast});
  add(table, {"Identity", {}, LayoutRule::follow, prepare_copy});
  add(table, {"Copy", {}, LayoutRule::follow, prepare_copy});
}

}  // namespace onnxddp::cpu

// One functor per elementwise function, compiled for the host and for devices. Kernels of every device are
// loops over these.
//
// The functions of float are branch-free on the host, so that compilers vectorise loops over them; the device
// compiler brings its own. Maximum errors on the host: exp 1.1 ulp, log 2 ulp, sigmoid 2.5 ulp (its denormal
// results are 0), tanh 2.5 ulp, erf 1.5 ulp; kernels_test samples them.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define ONNXDDP_HD __host__ __device__ __forceinline__
#else
#define ONNXDDP_HD inline __attribute__((always_inline))
#endif

namespace onnxddp::scalar {

namespace detail {

#if !defined(__CUDA_ARCH__)
inline float float_of(std::int32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::int32_t bits_of(float x) { return __builtin_bit_cast(std::int32_t, x); }

/// x = n*ln2 + r, |r| <= ln2/2; n is a whole number. Adding 1.5*2^23 rounds to it without a conversion, which
/// may trap.
struct Reduced {
  float r;
  std::int32_t n;
};
ONNXDDP_HD Reduced reduce_ln2(float x) {
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  return {(x - n * 0.693359375f) - n * -2.12194440e-4f, bits_of(shifted) - 0x4B400000};
}
/// (e^r - 1 - r) / r^2 for |r| <= ln2/2: the Taylor series, whose remainder is below 2^-27.
ONNXDDP_HD float exp_tail(float r) {
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  return p * r + 0.5f;
}
ONNXDDP_HD float pow2(std::int32_t n) { return float_of((n + 127) << 23); }

/// exp(x); in two factors, so that overflow gives infinity and underflow goes through the denormal numbers.
ONNXDDP_HD float exp_host(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const Reduced a = reduce_ln2(x);
  const float y = (a.r * a.r * exp_tail(a.r) + a.r) + 1.0f;
  const std::int32_t half = a.n >> 1;
  return y * pow2(half) * pow2(a.n - half);
}
/// exp(x) - 1 for 0 <= x <= 80.
ONNXDDP_HD float expm1_host(float x) {
  const Reduced a = reduce_ln2(x);
  const float scale = pow2(a.n);
  return scale * (a.r * a.r * exp_tail(a.r) + a.r) + (scale - 1.0f);
}
/// log(x): 2 atanh((m-1)/(m+1)) + e*ln2 with m in [sqrt(1/2), sqrt(2)).
ONNXDDP_HD float log_host(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? x * 8388608.0f : x;
  // Unsigned: the difference wraps for negative x, whose result is NaN in the end.
  const auto bits = static_cast<std::uint32_t>(bits_of(scaled));
  const std::int32_t exponent = static_cast<std::int32_t>(bits - 0x3F3504F3u) >> 23;
  const float m = float_of(static_cast<std::int32_t>(bits - (static_cast<std::uint32_t>(exponent) << 23)));
  const float e = static_cast<float>(exponent) - (tiny ? 23.0f : 0.0f);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  float p = 0.222221985f;
  p = p * z + 0.285714286f;
  p = p * z + 0.4f;
  p = p * z + 0.666666667f;
  float y = (s * z * p + e * -2.12194440e-4f + 2.0f * s) + e * 0.693359375f;
  y = x == 0.0f ? -__builtin_inff() : y;
  y = x < 0.0f ? __builtin_nanf("") : y;
  return x < __builtin_inff() ? y : x;  // infinity and NaN stay
}
/// tanh(x) = sign * m/(m+2), m = exp(2|x|) - 1; 1 to the last bit from 10 on.
ONNXDDP_HD float tanh_host(float x) {
  const float a = x < 0.0f ? -x : x;
  const float m = expm1_host(a > 10.0f ? 20.0f : 2.0f * a);
  const float y = m / (m + 2.0f);
  const float with_sign = x < 0.0f ? -y : y;
  return x != x ? x : with_sign;
}
/// erf(x): x + x*P(x^2) up to 1, then 1 - exp(Q(|x|)); P and Q are minimax fits, 1 to the last bit from 4 on.
ONNXDDP_HD float erf_host(float x) {
  const float a = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -0.00056314096f;
  p = p * z + 0.004917548f;
  p = p * z - 0.02671131f;
  p = p * z + 0.1128018f;
  p = p * z - 0.37612325f;
  p = p * z + 0.12837912f;
  const float t = a > 4.0f ? 4.0f : a;
  float q = 0.00018638273f;
  q = q * t - 0.002947692f;
  q = q * t + 0.021838196f;
  q = q * t - 0.10310702f;
  q = q * t - 0.63814455f;
  q = q * t - 1.1270894f;
  q = q * t - 0.00034148153f;
  const float tail = 1.0f - exp_host(q);
  const float y = a < 1.0f ? a + a * p : tail;
  const float with_sign = x < 0.0f ? -y : y;
  return x != x ? x : with_sign;
}
#endif

}  // namespace detail

// The functions. double: the C library's.
#if defined(__CUDA_ARCH__)
ONNXDDP_HD float exp(float x) { return ::expf(x); }
ONNXDDP_HD float log(float x) { return ::logf(x); }
ONNXDDP_HD float tanh(float x) { return ::tanhf(x); }
ONNXDDP_HD float erf(float x) { return ::erff(x); }
#else
ONNXDDP_HD float exp(float x) { return detail::exp_host(x); }
ONNXDDP_HD float log(float x) { return detail::log_host(x); }
ONNXDDP_HD float tanh(float x) { return detail::tanh_host(x); }
ONNXDDP_HD float erf(float x) { return detail::erf_host(x); }
#endif
ONNXDDP_HD float sqrt(float x) { return ::sqrtf(x); }
ONNXDDP_HD float pow(float x, float y) { return ::powf(x, y); }
ONNXDDP_HD double exp(double x) { return ::exp(x); }
ONNXDDP_HD double log(double x) { return ::log(x); }
ONNXDDP_HD double tanh(double x) { return ::tanh(x); }
ONNXDDP_HD double erf(double x) { return ::erf(x); }
ONNXDDP_HD double sqrt(double x) { return ::sqrt(x); }
ONNXDDP_HD double pow(double x, double y) { return ::pow(x, y); }

// Unary functors, x -> y of the same type. NaN stays NaN, except in Step.
#define ONNXDDP_FUNCTOR1(NAME, EXPRESSION) \
  struct NAME {                            \
    template <class T>                     \
    ONNXDDP_HD T operator()(T x) const {   \
      return static_cast<T>(EXPRESSION);   \
    }                                      \
  };
ONNXDDP_FUNCTOR1(Neg, T(0) - x)
ONNXDDP_FUNCTOR1(Abs, x < T(0) ? T(0) - x : x)
ONNXDDP_FUNCTOR1(Sign, x > T(0) ? T(1) : x < T(0) ? T(0) - T(1) : x)
ONNXDDP_FUNCTOR1(Relu, x < T(0) ? T(0) : x)
ONNXDDP_FUNCTOR1(Step, x > T(0) ? T(1) : T(0))
ONNXDDP_FUNCTOR1(Reciprocal, T(1) / x)
ONNXDDP_FUNCTOR1(Exp, scalar::exp(x))
ONNXDDP_FUNCTOR1(Log, scalar::log(x))
ONNXDDP_FUNCTOR1(Sqrt, scalar::sqrt(x))
ONNXDDP_FUNCTOR1(Sigmoid, T(1) / (T(1) + scalar::exp(-x)))
ONNXDDP_FUNCTOR1(Tanh, scalar::tanh(x))
ONNXDDP_FUNCTOR1(Erf, scalar::erf(x))
#undef ONNXDDP_FUNCTOR1

/// Clip and ClipMask have parameters.
template <class P>
struct Clip {
  P min, max;
  template <class T>
  ONNXDDP_HD T operator()(T x) const {
    const T lo = static_cast<T>(min), hi = static_cast<T>(max);
    const T y = x < lo ? lo : x;
    return y > hi ? hi : y;
  }
};
/// 1 where min <= x <= max, else 0.
template <class P>
struct ClipMask {
  P min, max;
  template <class T>
  ONNXDDP_HD T operator()(T x) const {
    return x >= static_cast<T>(min) && x <= static_cast<T>(max) ? T(1) : T(0);
  }
};

// Binary functors, (a, b) -> y of the same type.
#define ONNXDDP_FUNCTOR2(NAME, EXPRESSION)    \
  struct NAME {                               \
    template <class T>                        \
    ONNXDDP_HD T operator()(T a, T b) const { \
      return static_cast<T>(EXPRESSION);      \
    }                                         \
  };
ONNXDDP_FUNCTOR2(Add, a + b)
ONNXDDP_FUNCTOR2(Sub, a - b)
ONNXDDP_FUNCTOR2(Mul, a* b)
ONNXDDP_FUNCTOR2(Max, a > b || a != a ? a : b)
ONNXDDP_FUNCTOR2(Min, a < b || a != a ? a : b)
ONNXDDP_FUNCTOR2(Pow, scalar::pow(a, b))
#undef ONNXDDP_FUNCTOR2

/// Integers: truncates towards zero; division by zero gives 0 (and the most negative number by -1 itself)
/// instead of a trap.
struct Div {
  ONNXDDP_HD float operator()(float a, float b) const { return a / b; }
  ONNXDDP_HD double operator()(double a, double b) const { return a / b; }
  ONNXDDP_HD std::int64_t operator()(std::int64_t a, std::int64_t b) const {
    if (b == 0) return 0;
    return b == -1 ? static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(a)) : a / b;
  }
  ONNXDDP_HD std::int32_t operator()(std::int32_t a, std::int32_t b) const {
    return static_cast<std::int32_t>((*this)(static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)));
  }
};

// (a, b) -> bool.
#define ONNXDDP_PREDICATE(NAME, OPERATOR)        \
  struct NAME {                                  \
    template <class T>                           \
    ONNXDDP_HD bool operator()(T a, T b) const { \
      return a OPERATOR b;                       \
    }                                            \
  };
ONNXDDP_PREDICATE(Equal, ==)
ONNXDDP_PREDICATE(Less, <)
ONNXDDP_PREDICATE(Greater, >)
#undef ONNXDDP_PREDICATE

struct And {
  ONNXDDP_HD bool operator()(bool a, bool b) const { return a && b; }
};
struct Or {
  ONNXDDP_HD bool operator()(bool a, bool b) const { return a || b; }
};
struct Not {
  ONNXDDP_HD bool operator()(bool a) const { return !a; }
};

/// Lists for tables: X(op name), where the functor has the op's name. Unary ones for floats only, and for
/// every number.
#define ONNXDDP_UNARY_FLOAT_OPS(X) X(Reciprocal) X(Exp) X(Log) X(Sqrt) X(Sigmoid) X(Tanh) X(Erf)
#define ONNXDDP_UNARY_OPS(X) X(Neg) X(Abs) X(Sign) X(Relu) X(Step)
/// Binary ones: floats only, every number, number -> bool, bool -> bool.
#define ONNXDDP_BINARY_FLOAT_OPS(X) X(Pow)
#define ONNXDDP_BINARY_OPS(X) X(Add) X(Sub) X(Mul) X(Div) X(Max) X(Min)
#define ONNXDDP_COMPARE_OPS(X) X(Equal) X(Less) X(Greater)
#define ONNXDDP_LOGIC_OPS(X) X(And) X(Or)

/// SgdUpdate of one element with PyTorch's formulas. hyper = [lr, step, momentum, dampening, weight_decay].
template <class T>
struct Sgd {
  T lr, momentum, keep, weight_decay;  // keep = 1 - dampening
  bool first, nesterov;
  ONNXDDP_HD static Sgd from(const double* hyper, bool nesterov) {
    return {static_cast<T>(hyper[0]), static_cast<T>(hyper[2]), static_cast<T>(1.0 - hyper[3]),
            static_cast<T>(hyper[4]), hyper[1] <= 1.0,          nesterov};
  }
  /// Without momentum.
  ONNXDDP_HD T operator()(T p, T g) const { return p - lr * (g + weight_decay * p); }
  /// `velocity` is replaced.
  ONNXDDP_HD T operator()(T p, T g, T& velocity) const {
    g = g + weight_decay * p;
    velocity = first ? g : momentum * velocity + keep * g;
    return p - lr * (nesterov ? g + momentum * velocity : velocity);
  }
};

/// AdamUpdate of one element with PyTorch's formulas. hyper = [lr, step, beta1, beta2, eps, weight_decay];
/// the bias corrections are computed in double.
template <class T>
struct Adam {
  T rate, grow1, beta2, grow2, root_correction2, eps, weight_decay, shrink;  // rate = lr / (1 - beta1^step)
  ONNXDDP_HD static Adam from(const double* hyper, bool decoupled) {
    const double lr = hyper[0], step = hyper[1], beta1 = hyper[2], beta2 = hyper[3], decay = hyper[5];
    return {static_cast<T>(lr / (1.0 - ::pow(beta1, step))),
            static_cast<T>(1.0 - beta1),
            static_cast<T>(beta2),
            static_cast<T>(1.0 - beta2),
            static_cast<T>(::sqrt(1.0 - ::pow(beta2, step))),
            static_cast<T>(hyper[4]),
            static_cast<T>(decoupled ? 0.0 : decay),
            static_cast<T>(decoupled ? 1.0 - lr * decay : 1.0)};
  }
  /// Replaces the moments.
  ONNXDDP_HD void moments(T p, T g, T& m, T& v) const {
    g = g + weight_decay * p;
    m = m + grow1 * (g - m);
    v = beta2 * v + grow2 * g * g;
  }
  /// p.next from the new moments; `v` is vmax for amsgrad.
  ONNXDDP_HD T step(T p, T m, T v) const {
    return p * shrink - rate * (m / (scalar::sqrt(v) / root_correction2 + eps));
  }
};

}  // namespace onnxddp::scalar

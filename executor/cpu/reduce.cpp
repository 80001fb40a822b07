// Reductions over any axes. Accumulation is in double (integers: i64) in an order that does not depend on
// threads.
#include <cmath>
#include <limits>

#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

enum class Reduction { sum, mean, max };

template <class A>
struct SumOf {
  static constexpr A start = 0;
  A operator()(A total, A x) const { return total + x; }
};
template <class A>
struct MaxOf {
  static constexpr A start = std::numeric_limits<A>::has_infinity ? -std::numeric_limits<A>::infinity()
                                                                  : std::numeric_limits<A>::min();
  A operator()(A most, A x) const { return x > most || x != x ? x : most; }
};

/// Which input elements make an output element. Operand order: input, output.
struct Reduce {
  Nest<2> kept;     // strides of input and output
  Nest<2> reduced;  // strides of the input (output: 0)
  Nest<2>::Axis inner_kept{1, {}}, inner_reduced{1, {}};
  bool across = false;  // the input is contiguous along a kept axis: sum rows into rows
  int threads = 1;

  void finish() {
    kept.simplify();
    reduced.simplify();
    const auto step = [](const Nest<2>& n) { return n.axes.empty() ? INT64_MAX : n.axes.back().stride[0]; };
    across = step(kept) < step(reduced);
    inner_reduced = across ? Nest<2>::Axis{1, {}} : reduced.take_inner();
    inner_kept = across ? kept.take_inner() : Nest<2>::Axis{1, {}};
  }
};

template <class T, class A, class F>
void reduce_along(const Reduce& p, const T* x, T* y, F f, double scale) {
  const std::int64_t n = p.inner_reduced.size, s = p.inner_reduced.stride[0];
  parallel_for(
      p.threads, p.kept.count(), grain_of(n * p.reduced.count()), [&](std::int64_t begin, std::int64_t end) {
        p.kept.each(begin, end, [&](const auto& at) {
          A total = F::start;
          p.reduced.each(0, p.reduced.count(), [&](const auto& r) {
            const T* row = x + at[0] + r[0];
            if constexpr (std::is_same_v<F, SumOf<double>>) {
              if (s == 1) {
                total += sum_contiguous(row, n);
                return;
              }
            }
            for (std::int64_t i = 0; i < n; ++i) total = f(total, static_cast<A>(row[i * s]));
          });
          y[at[1]] =
              static_cast<T>(scale == 1.0 ? total : static_cast<A>(static_cast<double>(total) * scale));
        });
      });
}

template <class T, class A, class F>
void reduce_across(const Reduce& p, const T* x, T* y, F f, double scale) {
  constexpr std::int64_t kBlock = 256;
  const auto [sx, sy] = p.inner_kept.stride;
  const std::int64_t blocks = (p.inner_kept.size + kBlock - 1) / kBlock;
  const auto body = [&, sx = sx, sy = sy](std::int64_t begin, std::int64_t end) {
    A total[kBlock];
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int64_t first = job % blocks * kBlock, n = std::min(kBlock, p.inner_kept.size - first);
      p.kept.each(job / blocks, job / blocks + 1, [&](const auto& at) {
        std::fill(total, total + n, F::start);
        const T* base = x + at[0] + first * sx;
        p.reduced.each(0, p.reduced.count(), [&](const auto& r) {
          const T* row = base + r[0];
          if (sx == 1) {
#pragma omp simd
            for (std::int64_t i = 0; i < n; ++i) total[i] = f(total[i], static_cast<A>(row[i]));
          } else {
            for (std::int64_t i = 0; i < n; ++i) total[i] = f(total[i], static_cast<A>(row[i * sx]));
          }
        });
        T* out = y + at[1] + first * sy;
        for (std::int64_t i = 0; i < n; ++i) {
          out[i * sy] =
              static_cast<T>(scale == 1.0 ? total[i] : static_cast<A>(static_cast<double>(total[i]) * scale));
        }
      });
    }
  };
  parallel_for(p.threads, p.kept.count() * blocks,
               grain_of(p.reduced.count() * std::min(kBlock, p.inner_kept.size)), body);
}

template <class T, class A, class F>
Run reduce_run(Reduce plan, F f, double scale) {
  return [plan = std::move(plan), f, scale](const RunContext& r) {
    if (plan.across) {
      reduce_across<T, A>(plan, r.in<T>(0), r.out<T>(0), f, scale);
    } else {
      reduce_along<T, A>(plan, r.in<T>(0), r.out<T>(0), f, scale);
    }
  };
}

Run reduce(const PlanContext& c, Reduce plan, Reduction kind) {
  plan.threads = c.threads;
  const std::int64_t n = c.outputs[0].numel() == 0 ? 1 : c.inputs[0].numel() / c.outputs[0].numel();
  plan.finish();
  return with_number(c.inputs[0].dtype, [&](auto element) {
    using T = decltype(element);
    using A = std::conditional_t<std::is_floating_point_v<T>, double, std::int64_t>;
    if (kind == Reduction::max) return reduce_run<T, A>(std::move(plan), MaxOf<A>(), 1.0);
    return reduce_run<T, A>(std::move(plan), SumOf<A>(),
                            kind == Reduction::mean ? 1.0 / static_cast<double>(n) : 1.0);
  });
}

/// Reduce over `axes`; the output has them as 1 or not at all.
Run prepare_axes(const PlanContext& c, Reduction kind) {
  const SlotType& x = c.inputs[0];
  std::vector<bool> gone(x.shape.size(), false);
  const Ints axes = c.integers("axes");
  for (std::int64_t a : axes) gone[static_cast<std::size_t>(normal_axis(a, x.shape.size()))] = true;
  const bool keep = c.flag("keepdims");
  const Ints in = x.strides(), out = c.outputs[0].strides();
  Reduce plan;
  std::size_t o = 0;
  for (std::size_t d = 0; d < x.shape.size(); ++d) {
    if (gone[d]) {
      plan.reduced.axes.push_back({x.shape[d], {in[d], 0}});
    } else {
      plan.kept.axes.push_back({x.shape[d], {in[d], out[o]}});
    }
    if (!gone[d] || keep) ++o;
  }
  return reduce(c, std::move(plan), kind);
}

/// Sums what broadcasting the output's shape to x's would add.
Run prepare_sum_to(PlanContext& c) {
  const SlotType& x = c.inputs[0];
  const SlotType& y = c.outputs[0];
  const Ints in = x.strides(), out = y.strides();
  const std::size_t lead = x.shape.size() - y.shape.size();
  Reduce plan;
  for (std::size_t d = 0; d < x.shape.size(); ++d) {
    if (d < lead || (y.shape[d - lead] == 1 && x.shape[d] != 1)) {
      plan.reduced.axes.push_back({x.shape[d], {in[d], 0}});
    } else {
      plan.kept.axes.push_back({x.shape[d], {in[d], out[d - lead]}});
    }
  }
  return reduce(c, std::move(plan), Reduction::sum);
}

/// The input as it comes, the output dense.
LayoutChoice input_as_it_is(const PlanContext& c) { return {{c.inputs[0].layout}, {Layout::dense}}; }

template <class T>
Run arg_max(const PlanContext& c) {
  return [split = split_at(c.inputs[0].shape, c.integer("axis"))](const RunContext& r) {
    const auto [outer, n, inner] = split;
    const T* in = r.in<T>(0);
    std::int64_t* out = r.out<std::int64_t>(0);
    for (std::int64_t o = 0; o < outer; ++o) {
      for (std::int64_t i = 0; i < inner; ++i) {
        const T* row = in + o * n * inner + i;
        std::int64_t best = 0;
        for (std::int64_t k = 1; k < n; ++k) {
          if (row[k * inner] > row[best * inner]) best = k;
        }
        out[o * inner + i] = best;
      }
    }
  };
}

/// Sum of the squares of all inputs, in double, in a fixed order.
template <class T>
Run sum_squares(const PlanContext& c) {
  std::vector<std::int64_t> sizes;
  for (const SlotType& t : c.inputs) sizes.push_back(t.numel());
  return [sizes = std::move(sizes)](const RunContext& r) {
    double total = 0;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      const T* x = r.in<T>(k);
      const std::int64_t n = sizes[k];
      double part[8] = {};
      std::int64_t i = 0;
      for (; i + 8 <= n; i += 8) {
#pragma omp simd
        for (int j = 0; j < 8; ++j) part[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
      }
      for (; i < n; ++i) part[i & 7] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
      for (double p : part) total += p;
    }
    *r.out<T>(0) = static_cast<T>(total);
  };
}

template <class T>
Run count_targets(const PlanContext& c) {
  const std::int64_t n = c.inputs[0].numel(), ignore = c.integer("ignore_index");
  const DType to = c.outputs[0].dtype;
  return [=](const RunContext& r) {
    const T* t = r.in<T>(0);
    const std::int64_t kept =
        std::count_if(t, t + n, [&](T x) { return static_cast<std::int64_t>(x) != ignore; });
    with_number(to, [&](auto element) {
      *r.out<decltype(element)>(0) = static_cast<decltype(element)>(kept);
      return 0;
    });
  };
}

}  // namespace

void add_reductions(KernelTable& table) {
  const auto axes = [](Reduction kind) { return [kind](PlanContext& c) { return prepare_axes(c, kind); }; };
  add(table, {"ReduceSum", kNumbers, LayoutRule::choose, axes(Reduction::sum), input_as_it_is});
  add(table, {"ReduceMean", kFloats, LayoutRule::choose, axes(Reduction::mean), input_as_it_is});
  add(table, {"ReduceMax", kNumbers, LayoutRule::choose, axes(Reduction::max), input_as_it_is});
  add(table, {"SumTo", kNumbers, LayoutRule::choose, prepare_sum_to, input_as_it_is});
  add(table, {"ArgMax", kNumbers, LayoutRule::dense, [](PlanContext& c) {
                return with_number(c.inputs[0].dtype,
                                   [&](auto element) { return arg_max<decltype(element)>(c); });
              }});
  add(table, {"SumSquares", kFloats, LayoutRule::dense, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype,
                                  [&](auto element) { return sum_squares<decltype(element)>(c); });
              }});
  add(table, {"CountTargets", {DType::i64, DType::i32}, LayoutRule::dense, [](PlanContext& c) {
                return c.inputs[0].dtype == DType::i64 ? count_targets<std::int64_t>(c)
                                                       : count_targets<std::int32_t>(c);
              }});
}

}  // namespace onnxddp::cpu

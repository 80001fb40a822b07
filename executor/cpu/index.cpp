// Gather, its gradient, and dropout.
#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"
#include "executor/philox.h"

namespace onnxddp::cpu {
namespace {

/// Indices of i64 or i32 along an axis of `size`.
class Indices {
 public:
  Indices(DType dtype, std::int64_t count, std::int64_t size)
      : wide_(dtype == DType::i64), count_(count), size_(size) {
    CHECK(wide_ || dtype == DType::i32, "indices of ", dtype_name(dtype));
  }
  std::int64_t count() const { return count_; }
  std::int64_t at(const void* indices, std::int64_t i) const {
    const std::int64_t k = raw(indices, i);
    return k < 0 ? k + size_ : k;
  }
  /// Throws Error for the first index that is out of range.
  void check(const void* indices) const {
    for (std::int64_t i = 0; i < count_; ++i) {
      const std::int64_t k = raw(indices, i);
      if (k < -size_ || k >= size_) {
        throw Error(cat("Gather: index ", k, " at position ", i, " is outside of ", -size_, "..", size_ - 1));
      }
    }
  }

 private:
  std::int64_t raw(const void* indices, std::int64_t i) const {
    return wide_ ? static_cast<const std::int64_t*>(indices)[i]
                 : static_cast<const std::int32_t*>(indices)[i];
  }
  bool wide_;
  std::int64_t count_, size_;
};

template <class T>
Run gather(const PlanContext& c) {
  const Split t = split_at(c.inputs[0].shape, c.integer("axis"));
  const Indices indices(c.inputs[1].dtype, c.inputs[1].numel(), t.size);
  return [=, threads = c.threads](const RunContext& r) {
    indices.check(r.inputs[1]);
    const T* x = r.in<T>(0);
    T* y = r.out<T>(0);
    parallel_for(threads, t.outer * indices.count(), grain_of(t.inner),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t row = begin; row < end; ++row) {
                     const std::int64_t k = indices.at(r.inputs[1], row % indices.count());
                     const T* from = x + (row / indices.count() * t.size + k) * t.inner;
                     std::copy(from, from + t.inner, y + row * t.inner);
                   }
                 });
  };
}

/// Zeros, then rows added in the order of the indices; threads share the columns, so that the order holds.
template <class T>
Run gather_grad(const PlanContext& c) {
  const Split t = split_at(c.outputs[0].shape, c.integer("axis"));
  const Indices indices(c.inputs[1].dtype, c.inputs[1].numel(), t.size);
  return [=, threads = c.threads](const RunContext& r) {
    indices.check(r.inputs[1]);
    const T* dy = r.in<T>(0);
    T* dx = r.out<T>(0);
    const std::int64_t n = indices.count();
    parallel_for(threads, t.inner, grain_of(t.outer * (n + t.size)),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t o = 0; o < t.outer; ++o) {
                     for (std::int64_t k = 0; k < t.size; ++k)
                       std::fill_n(dx + (o * t.size + k) * t.inner + begin, end - begin, T(0));
                     for (std::int64_t i = 0; i < n; ++i) {
                       T* to = dx + (o * t.size + indices.at(r.inputs[1], i)) * t.inner;
                       const T* from = dy + (o * n + i) * t.inner;
#pragma omp simd
                       for (std::int64_t j = begin; j < end; ++j) to[j] += from[j];
                     }
                   }
                 });
  };
}

/// Elements [first, first+n) of a run whose global numbers are consecutive: 4 share a Philox block.
template <class T>
void drop_run(const DropoutBits& bits, std::int64_t first, std::int64_t n, const T* x, T* y, bool* mask,
              T scale) {
  constexpr std::int64_t kBlocks = 64;
  std::uint32_t words[4 * kBlocks];
  const DropoutBits local = bits;
  const std::uint64_t global = local.global(first);
  const auto threshold = static_cast<std::uint32_t>(local.threshold);
  const bool all = local.threshold > 0xFFFFFFFFu;  // ratio 1 drops everything
  const std::int64_t skip = static_cast<std::int64_t>(global & 3);
  for (std::int64_t done = -skip; done < n; done += 4 * kBlocks) {
    const std::uint64_t number = (global >> 2) + static_cast<std::uint64_t>((done + skip) / 4);
    const std::int64_t end = std::min(done + 4 * kBlocks, n), blocks = (end - done + 3) / 4;
#pragma omp simd
    for (std::int64_t b = 0; b < blocks; ++b) {
      const Philox p = local.block(number + static_cast<std::uint64_t>(b));
      words[4 * b] = p.word[0];
      words[4 * b + 1] = p.word[1];
      words[4 * b + 2] = p.word[2];
      words[4 * b + 3] = p.word[3];
    }
    const std::int64_t begin = std::max<std::int64_t>(done, 0);
    const std::uint32_t* word = words + (begin - done);
    const std::int64_t at = first + begin, count = end - begin;
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i)
      y[at + i] = !all && word[i] >= threshold ? x[at + i] * scale : T(0);
    if (!mask) continue;
    for (std::int64_t i = 0; i < count; ++i) mask[at + i] = !all && word[i] >= threshold;
  }
}

template <class T>
Run dropout(const PlanContext& c) {
  const SlotType& x = c.inputs[0];
  const std::int64_t n = x.numel(), key = c.integer("key");
  const double ratio = c.number("ratio");
  const bool batch = c.flag("batch") && !x.shape.empty(), masked = c.has_output(1);
  const std::int64_t inner = batch ? (n == 0 ? 1 : n / x.shape[0]) : 0;
  const T scale = static_cast<T>(ratio < 1.0 ? 1.0 / (1.0 - ratio) : 0.0);
  return [=, threads = c.threads](const RunContext& r) {
    const DropoutBits bits = DropoutBits::from(r.in<std::int64_t>(1), key, ratio, inner);
    const T* in = r.in<T>(0);
    T* out = r.out<T>(0);
    bool* mask = masked ? r.out<bool>(1) : nullptr;
    if (!batch || bits.world == 1) {
      parallel_for(threads, n, kGrain / 8,
                   [&](std::int64_t b, std::int64_t e) { drop_run(bits, b, e - b, in, out, mask, scale); });
      return;
    }
    parallel_for(threads, n / inner, grain_of(inner * 8), [&](std::int64_t b, std::int64_t e) {
      for (std::int64_t row = b; row < e; ++row) drop_run(bits, row * inner, inner, in, out, mask, scale);
    });
  };
}

}  // namespace

void add_indexing(KernelTable& table) {
  add(table, {"Gather", {}, LayoutRule::dense, [](PlanContext& c) {
                return with_width(c.inputs[0].dtype,
                                  [&](auto element) { return gather<decltype(element)>(c); });
              }});
  add(table, {"GatherGrad", kFloats, LayoutRule::dense, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype,
                                  [&](auto element) { return gather_grad<decltype(element)>(c); });
              }});
  add(table, {"Dropout", kFloats, LayoutRule::dense, [](PlanContext& c) {
                return with_float(c.inputs[0].dtype,
                                  [&](auto element) { return dropout<decltype(element)>(c); });
              }});
}

}  // namespace onnxddp::cpu

// Kernels that move elements: Reshape, Transpose, Expand, Concat, Slice, SumPieces, and the planner's
// Reorder.
#include "executor/cpu/kernels.h"
#include "executor/cpu/loops.h"

namespace onnxddp::cpu {
namespace {

/// One strided copy. Where input and output are contiguous along different axes, those two are walked in
/// tiles, so that both stay in the cache.
struct Move {
  Nest<2> nest;
  Nest<2>::Axis inner{1, {}}, other{1, {}};
  std::int64_t out_offset = 0, in_offset = 0;
  int threads = 1;

  void finish() {
    nest.simplify();
    inner = nest.take_inner();
    if (inner.stride[1] == 1 || inner.size == 1) return;
    for (std::size_t d = 0; d < nest.axes.size(); ++d) {
      if (nest.axes[d].stride[1] != 1) continue;
      other = nest.axes[d];
      nest.axes.erase(nest.axes.begin() + static_cast<std::ptrdiff_t>(d));
      return;
    }
  }

  template <class T>
  void run(T* out, const T* in) const {
    out += out_offset;
    in += in_offset;
    if (other.size == 1) {
      if (nest.axes.empty() && inner.stride[0] == 1 && inner.stride[1] == 1) {
        parallel_for(threads, inner.size, kGrain,
                     [&](std::int64_t b, std::int64_t e) { std::copy(in + b, in + e, out + b); });
      } else {
        strided_copy(out, in, nest, inner, threads);
      }
      return;
    }
    constexpr std::int64_t kTile = 16;
    const std::int64_t strips = (other.size + kTile - 1) / kTile;
    parallel_for(threads, nest.count() * strips, grain_of(inner.size * kTile),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t job = begin; job < end; ++job) {
                     const std::int64_t first = job % strips * kTile,
                                        last = std::min(first + kTile, other.size);
                     nest.each(job / strips, job / strips + 1,
                               [&](const auto& at) { tiles(out + at[0], in + at[1], first, last); });
                   }
                 });
  }

 private:
  template <class T>
  void tiles(T* out, const T* in, std::int64_t first, std::int64_t last) const {
    constexpr std::int64_t kTile = 16;
    const std::int64_t so = inner.stride[0], si = inner.stride[1], to = other.stride[0];
    for (std::int64_t i0 = 0; i0 < inner.size; i0 += kTile) {
      const std::int64_t i1 = std::min(i0 + kTile, inner.size);
      for (std::int64_t j = first; j < last; ++j) {
        for (std::int64_t i = i0; i < i1; ++i) out[j * to + i * so] = in[j + i * si];
      }
    }
  }
};

/// Copies `count` elements per axis between tensors with these strides and offsets.
Move make_move(const Ints& size, const Ints& out, const Ints& in, std::int64_t out_offset,
               std::int64_t in_offset, int threads) {
  Move move;
  for (std::size_t d = 0; d < size.size(); ++d) move.nest.axes.push_back({size[d], {out[d], in[d]}});
  move.out_offset = out_offset;
  move.in_offset = in_offset;
  move.threads = threads;
  move.finish();
  return move;
}

Run run_move(const PlanContext& c, Move move) {
  return with_width(c.inputs[0].dtype, [&](auto element) -> Run {
    using T = decltype(element);
    return [move = std::move(move)](const RunContext& r) { move.run(r.out<T>(0), r.in<T>(0)); };
  });
}

/// The elements in dense order under another shape: a copy, or nothing where the planner shares the memory.
Run prepare_reshape(PlanContext& c) {
  const std::size_t bytes = c.outputs[0].bytes();
  return [bytes](const RunContext& r) {
    if (r.outputs[0] != r.inputs[0] && bytes != 0) std::memcpy(r.outputs[0], r.inputs[0], bytes);
  };
}

Run prepare_transpose(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  return run_move(c, make_move(y.shape, y.strides(), transposed_strides(c), 0, 0, c.threads));
}

Run prepare_expand(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  return run_move(c,
                  make_move(y.shape, y.strides(), broadcast_strides(c.inputs[0], y.shape), 0, 0, c.threads));
}

/// From one memory order to another; only in plans.
Run prepare_reorder(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  return run_move(c, make_move(y.shape, y.strides(), c.inputs[0].strides(), 0, 0, c.threads));
}

Run prepare_concat(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  const auto axis = static_cast<std::size_t>(normal_axis(c.integer("axis"), y.shape.size()));
  std::vector<Move> moves;
  std::int64_t at = 0;
  for (const SlotType& x : c.inputs) {
    moves.push_back(make_move(x.shape, y.strides(), x.strides(), at * y.strides()[axis], 0, c.threads));
    at += x.shape[axis];
  }
  return with_width(y.dtype, [&](auto element) -> Run {
    using T = decltype(element);
    return [moves = std::move(moves)](const RunContext& r) {
      for (std::size_t k = 0; k < moves.size(); ++k) moves[k].run(r.out<T>(0), r.in<T>(k));
    };
  });
}

Run prepare_slice(PlanContext& c) {
  const SlotType& y = c.outputs[0];
  const Part from = sliced_part(c);
  return run_move(c, make_move(y.shape, y.strides(), from.strides, 0, from.offset, c.threads));
}

/// Zeros, then every piece added at its place.
template <class T>
Run sum_pieces(const PlanContext& c) {
  const SlotType& y = c.outputs[0];
  struct Piece {
    Nest<2> nest;
    Nest<2>::Axis inner;
    std::int64_t offset;
  };
  std::vector<Piece> pieces;
  for (std::size_t k = 0; k < c.inputs.size(); ++k) {
    const Part to = piece_part(c, k);
    Piece piece{{}, {1, {}}, to.offset};
    const Ints from = c.inputs[k].strides();
    for (std::size_t d = 0; d < from.size(); ++d)
      piece.nest.axes.push_back({c.inputs[k].shape[d], {to.strides[d], from[d]}});
    piece.nest.simplify();
    piece.inner = piece.nest.take_inner();
    pieces.push_back(std::move(piece));
  }
  return [pieces = std::move(pieces), n = y.numel(), threads = c.threads](const RunContext& r) {
    T* out = r.out<T>(0);
    parallel_for(threads, n, kGrain,
                 [&](std::int64_t b, std::int64_t e) { std::fill(out + b, out + e, T(0)); });
    for (std::size_t k = 0; k < pieces.size(); ++k) {
      const Piece& p = pieces[k];
      const T* in = r.in<T>(k);
      const auto [so, si] = p.inner.stride;
      parallel_for(threads, p.nest.count(), grain_of(p.inner.size),
                   [&, so = so, si = si](std::int64_t b, std::int64_t e) {
                     p.nest.each(b, e, [&](const auto& at) {
                       T* y0 = out + p.offset + at[0];
                       const T* x0 = in + at[1];
                       if (so == 1 && si == 1) {
#pragma omp simd
                         for (std::int64_t i = 0; i < p.inner.size; ++i) y0[i] += x0[i];
                       } else {
                         for (std::int64_t i = 0; i < p.inner.size; ++i) y0[i * so] += x0[i * si];
                       }
                     });
                   });
    }
  };
}

/// Everything in NHWC if an input of rank 4 comes so and the output has rank 4.
LayoutChoice common_layout(const PlanContext& c) {
  const bool nhwc = c.outputs[0].shape.size() == 4 &&
                    std::any_of(c.inputs.begin(), c.inputs.end(),
                                [](const SlotType& t) { return t.layout == Layout::nhwc; });
  const Layout layout = nhwc ? Layout::nhwc : Layout::dense;
  return {std::vector<Layout>(c.inputs.size(), layout), {layout}};
}

/// A value a channel spread over an image, as the gradient of global pooling: NHWC, as its readers are.
LayoutChoice expand_layout(const PlanContext& c) {
  const Ints& x = c.inputs[0].shape;
  const Ints& y = c.outputs[0].shape;
  const bool image =
      y.size() == 4 && x.size() == 4 && x[0] == y[0] && x[1] == y[1] && y[1] > 1 && x[2] == 1 && x[3] == 1;
  return {{c.inputs[0].layout}, {image ? Layout::nhwc : Layout::dense}};
}

LayoutChoice dense_output(const PlanContext& c) { return {{c.inputs[0].layout}, {Layout::dense}}; }

}  // namespace

void add_layouts(KernelTable& table) {
  add(table, {"Reshape", {}, LayoutRule::dense, prepare_reshape});
  add(table, {"Transpose", {}, LayoutRule::choose, prepare_transpose, dense_output});
  add(table, {"Expand", {}, LayoutRule::choose, prepare_expand, expand_layout});
  add(table, {"Concat", {}, LayoutRule::choose, prepare_concat, common_layout});
  add(table, {"Slice", {}, LayoutRule::choose, prepare_slice, common_layout});
  add(table, {"SumPieces", kNumbers, LayoutRule::choose,
              [](PlanContext& c) {
                return with_number(c.inputs[0].dtype,
                                   [&](auto element) { return sum_pieces<decltype(element)>(c); });
              },
              common_layout});
  add(table, {"Reorder", {}, LayoutRule::dense, prepare_reorder});
}

}  // namespace onnxddp::cpu

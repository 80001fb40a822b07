// What several families share: comparisons of symbolic dimensions, folding of small integer tensors, axes.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <span>

#include "graph/op.h"

namespace onnxddp {

/// Default of CrossEntropyLoss' and CountTargets' ignore_index: no label is ignored.
inline constexpr std::int64_t kNoIgnoredLabel = std::numeric_limits<std::int64_t>::min();
/// Most elements whose contents are followed symbolically.
inline constexpr std::int64_t kMostFolded = 64;

/// Whether the two are known to be different sizes. Undecidable pairs are compared again when symbols are
/// bound.
bool differ(const Dim& a, const Dim& b);
bool differ(const Shape& a, const Shape& b);
/// Axes made non-negative, sorted, without repetition; throws Error when out of range or repeated.
Ints sorted_axes(const Ints& axes, std::size_t rank);
/// 0 … rank-1.
Ints all_axes(std::size_t rank);
/// The numbers of `dims`; throws Error naming `what` unless all are constant.
Ints constants(const Dims& dims, std::string_view what);

/// fold_dims of an elementwise op over broadcasting integer inputs: `f` of one element of each input, or
/// nothing where the result is not known.
using FoldElement = std::function<std::optional<Dim>(std::span<const Dim>)>;
std::optional<Dims> fold_elements(const Inference& i, const FoldElement& f);
/// fold_dims of ops that keep the elements and their order.
std::optional<Dims> fold_same(const Inference& i);

/// `attrs` with `extra` added or replaced.
Attrs with(Attrs attrs, const Attrs& extra);
/// x with the kept axes of a reduction put back as 1: `shape` with ones at axes.
Shape kept(Shape shape, const Ints& axes);
/// Slices [start, end) with step 1 along one axis.
Expr slice(Expr x, std::int64_t axis, const Dim& start, const Dim& end);
/// The number in a one-element constant that is known before the run, or nothing.
std::optional<double> known_number(const OnnxNode& n, std::size_t i);

}  // namespace onnxddp

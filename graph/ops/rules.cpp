#include "graph/ops/rules.h"

#include <algorithm>
#include <numeric>

namespace onnxddp {

bool differ(const Dim& a, const Dim& b) {
  const Dim difference = a - b;
  return difference.is_constant() && difference.value() != 0;
}

bool differ(const Shape& a, const Shape& b) {
  if (a.size() != b.size()) return true;
  for (std::size_t k = 0; k < a.size(); ++k)
    if (differ(a[k], b[k])) return true;
  return false;
}

Ints sorted_axes(const Ints& axes, std::size_t rank) {
  Ints sorted;
  for (const std::int64_t axis : axes) sorted.push_back(normal_axis(axis, rank));
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    throw Error(cat("axes ", shape_str(axes), " name one axis twice"));
  return sorted;
}

Ints all_axes(std::size_t rank) {
  Ints axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

Ints constants(const Dims& dims, std::string_view what) {
  if (!is_static(dims)) throw Error(cat(what, " ", shape_str(dims), " must be plain numbers"));
  return static_shape(dims);
}

namespace {

/// Offset in an input of `from` for element `index` of the broadcast shape `to`.
std::int64_t source_offset(std::int64_t index, const Ints& to, const Ints& from) {
  std::int64_t offset = 0, stride = 1;
  for (std::size_t k = to.size(); k-- > 0;) {
    const std::int64_t at = index % to[k];
    index /= to[k];
    const std::size_t missing = to.size() - from.size();
    if (k < missing) continue;
    const std::int64_t size = from[k - missing];
    if (size != 1) offset += at * stride;
    stride *= size;
  }
  return offset;
}

}  // namespace

std::optional<Dims> fold_elements(const Inference& i, const FoldElement& f) {
  std::vector<Dims> contents;
  Shape shape;
  for (std::size_t k = 0; k < i.count(); ++k) {
    if (!i.has(k) || !is_static(i.shape(k))) return std::nullopt;
    const std::optional<Dims> ints = i.ints(k);
    if (!ints) return std::nullopt;
    contents.push_back(*ints);
    shape = broadcast(shape, i.shape(k));
  }
  const Ints to = static_shape(shape);
  const std::int64_t count = numel(to);
  if (count > kMostFolded) return std::nullopt;
  Dims result;
  for (std::int64_t e = 0; e < count; ++e) {
    Dims operands;
    for (std::size_t k = 0; k < i.count(); ++k)
      operands.push_back(
          contents[k].at(static_cast<std::size_t>(source_offset(e, to, static_shape(i.shape(k))))));
    const std::optional<Dim> value = f(operands);
    if (!value) return std::nullopt;
    result.push_back(*value);
  }
  return result;
}

std::optional<Dims> fold_same(const Inference& i) { return i.ints(0); }

Attrs with(Attrs attrs, const Attrs& extra) {
  for (const auto& [name, value] : extra) attrs[name] = value;
  return attrs;
}

Shape kept(Shape shape, const Ints& axes) {
  for (const std::int64_t axis : axes) shape.at(static_cast<std::size_t>(axis)) = 1;
  return shape;
}

Expr slice(Expr x, std::int64_t axis, const Dim& start, const Dim& end) {
  return call(
      "Slice", {x},
      {{"axes", Ints{axis}}, {"starts", make_attr({start})}, {"ends", make_attr({end})}, {"steps", Ints{1}}});
}

std::optional<double> known_number(const OnnxNode& n, std::size_t i) {
  const Value& value = n.b.graph().value(n.inputs.at(i));
  if (value.kind != Kind::constant || !value.data || value.data->numel() != 1) return std::nullopt;
  return value.data->as_double(0);
}

}  // namespace onnxddp

// Ops that move elements: Reshape, Transpose, Expand, Concat, Slice, SumPieces, and what is made of them.
#include <algorithm>

#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

// ---- Reshape, Transpose, Expand

void reshape_infer(Inference& i) {
  const Shape to = i.dims("shape");
  i.require(!differ(numel(to), numel(i.shape(0))), "cannot reshape ", shape_str(i.shape(0)), " to ",
            shape_str(to));
  i.y({i.x(0).dtype, to});
}

void transpose_infer(Inference& i) {
  const Ints perm = i.integers("perm");
  Ints sorted = perm;
  std::sort(sorted.begin(), sorted.end());
  i.require(sorted == all_axes(i.rank(0)), "perm ", shape_str(perm), " is not a permutation of the axes");
  Shape to;
  for (const std::int64_t axis : perm) to.push_back(i.shape(0)[static_cast<std::size_t>(axis)]);
  i.y({i.x(0).dtype, to});
}

void transpose_gradient(Gradient& g) {
  const Ints perm = g.integers("perm");
  Ints inverse(perm.size());
  for (std::size_t k = 0; k < perm.size(); ++k)
    inverse[static_cast<std::size_t>(perm[k])] = static_cast<std::int64_t>(k);
  g.dx(0, transpose(g.dy(), inverse));
}

void expand_infer(Inference& i) {
  const Shape to = i.dims("shape"), &x = i.shape(0);
  bool fits = x.size() <= to.size();
  for (std::size_t k = 0; fits && k < x.size(); ++k)
    fits = x[k] == Dim(1) || !differ(x[k], to[k + to.size() - x.size()]);
  i.require(fits, "cannot expand ", shape_str(x), " to ", shape_str(to));
  i.y({i.x(0).dtype, to});
}

std::optional<Dims> expand_fold(const Inference& i) {
  const Shape to = i.dims("shape");
  if (!i.ints(0) || !is_static(to) || numel(static_shape(to)) > kMostFolded) return std::nullopt;
  if (i.ints(0)->size() != 1) return broadcast(i.shape(0), to) == i.shape(0) ? i.ints(0) : std::nullopt;
  return Dims(static_cast<std::size_t>(numel(static_shape(to))), i.ints(0)->front());
}

// ---- Concat

void concat_infer(Inference& i) {
  const auto axis = static_cast<std::size_t>(i.integer("axis"));
  i.require(axis < i.rank(0), "axis ", i.integer("axis"), " is out of range");
  Shape to = i.shape(0);
  for (std::size_t k = 1; k < i.count(); ++k) {
    i.require(i.x(k).dtype == i.x(0).dtype, "the element types differ");
    Shape same = i.shape(k);
    i.require(same.size() == to.size(), "the ranks differ");
    to[axis] += same[axis];
    same[axis] = i.shape(0)[axis];
    i.require(!differ(same, i.shape(0)), "the sizes differ beside axis ", axis);
  }
  i.y({i.x(0).dtype, to});
}

std::optional<Dims> concat_fold(const Inference& i) {
  Dims all;
  for (std::size_t k = 0; k < i.count(); ++k) {
    if (i.rank(k) != 1 || !i.ints(k)) return std::nullopt;
    const Dims part = *i.ints(k);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all.size() <= kMostFolded ? std::optional(all) : std::nullopt;
}

void concat_gradient(Gradient& g) {
  const std::int64_t axis = g.integer("axis");
  Dim start = 0;
  for (std::size_t k = 0; k < g.count(); ++k) {
    const Dim end = start + g.type(k).shape[static_cast<std::size_t>(axis)];
    g.dx(k, slice(g.dy(), axis, start, end));
    start = end;
  }
}

// ---- Slice. Normalised: 0 <= start, end <= size; with a negative step, end -1 means up to the first
// element.

Dim slice_size(const Dim& start, const Dim& end, std::int64_t step) {
  const Dim span = step > 0 ? end - start : start - end;
  const std::int64_t stride = step > 0 ? step : -step;
  const Dim size = floor_div(span + (stride - 1), stride);
  return size.is_constant() ? Dim(std::max<std::int64_t>(size.value(), 0)) : size;
}

/// Throws unless low <= value <= high where that is decidable.
void require_within(const Inference& i, const Dim& value, std::int64_t low, const Dim& high,
                    std::string_view what) {
  const Dim room = high - value;
  i.require(!(value.is_constant() && value.value() < low) && !(room.is_constant() && room.value() < 0), what,
            " ", value, " is not in ", low, "..", high);
}

void slice_infer(Inference& i) {
  const Ints axes = i.integers("axes"), steps = i.integers("steps");
  const Dims starts = i.dims("starts"), ends = i.dims("ends");
  i.require(starts.size() == axes.size() && ends.size() == axes.size() && steps.size() == axes.size(),
            "axes, starts, ends and steps differ in length");
  Shape to = i.shape(0);
  for (std::size_t k = 0; k < axes.size(); ++k) {
    const auto axis = static_cast<std::size_t>(axes[k]);
    i.require(axis < to.size() && std::count(axes.begin(), axes.end(), axes[k]) == 1, "axes ",
              shape_str(axes));
    i.require(steps[k] != 0, "a step is 0");
    const Dim& size = i.shape(0)[axis];
    require_within(i, starts[k], 0, steps[k] > 0 ? size : size - 1, "start");
    require_within(i, ends[k], steps[k] > 0 ? 0 : -1, size, "end");
    to[axis] = slice_size(starts[k], ends[k], steps[k]);
  }
  i.y({i.x(0).dtype, to});
}

std::optional<Dims> slice_fold(const Inference& i) {
  const std::optional<Dims> ints = i.ints(0);
  const Dims starts = i.dims("starts"), ends = i.dims("ends");
  if (!ints || i.rank(0) != 1 || !is_static(starts) || !is_static(ends)) return std::nullopt;
  if (starts.empty()) return ints;
  const std::int64_t start = starts[0].value(), step = i.integers("steps")[0];
  const std::int64_t count = slice_size(start, ends[0], step).value();
  Dims picked;
  for (std::int64_t k = 0; k < count; ++k)
    picked.push_back(ints->at(static_cast<std::size_t>(start + k * step)));
  return picked;
}

void slice_gradient(Gradient& g) {
  g.dx_piece(0, g.dy(), g.integers("axes"), g.dims("starts"), g.dims("ends"), g.integers("steps"));
}

// ---- SumPieces

void sum_pieces_infer(Inference& i) {
  const Shape to = i.dims("shape");
  const Dims starts = i.dims("starts");
  const Ints steps = i.integers("steps");
  i.require(starts.size() == i.count() * to.size() && steps.size() == starts.size(), "starts and steps need ",
            i.count() * to.size(), " numbers");
  for (std::size_t k = 0; k < i.count(); ++k) {
    i.require(i.rank(k) == to.size() && i.x(k).dtype == i.x(0).dtype, "piece ", k, " does not fit ",
              shape_str(to));
    for (std::size_t axis = 0; axis < to.size(); ++axis) {
      const Dim &size = i.shape(k)[axis], &start = starts[k * to.size() + axis];
      if (size == Dim(0)) continue;
      require_within(i, start, 0, to[axis] - 1, "start");
      require_within(i, start + (size - 1) * steps[k * to.size() + axis], 0, to[axis] - 1, "last position");
    }
  }
  i.y({i.x(0).dtype, to});
}

void sum_pieces_gradient(Gradient& g) {
  const std::size_t rank = g.dims("shape").size();
  const Dims starts = g.dims("starts");
  const Ints steps = g.integers("steps");
  for (std::size_t k = 0; k < g.count(); ++k) {
    const auto at = static_cast<std::ptrdiff_t>(k * rank), to = static_cast<std::ptrdiff_t>((k + 1) * rank);
    const Dims first(starts.begin() + at, starts.begin() + to);
    const Ints stride(steps.begin() + at, steps.begin() + to);
    Dims ends;
    for (std::size_t axis = 0; axis < rank; ++axis)
      ends.push_back(first[axis] + (g.type(k).shape[axis] - 1) * stride[axis] + (stride[axis] > 0 ? 1 : -1));
    g.dx(k, call("Slice", {g.dy()},
                 {{"axes", all_axes(rank)},
                  {"starts", make_attr(first)},
                  {"ends", make_attr(ends)},
                  {"steps", stride}}));
  }
}

// ---- Flatten, Squeeze, Unsqueeze, Split: made of the above

void flatten_infer(Inference& i) {
  const std::int64_t axis = i.integer("axis"), rank = static_cast<std::int64_t>(i.rank(0));
  i.require(axis >= -rank && axis <= rank, "axis ", axis, " is out of range");
  const Shape& x = i.shape(0);
  const auto middle = x.begin() + (axis < 0 ? axis + rank : axis);
  i.y({i.x(0).dtype, {numel(Shape(x.begin(), middle)), numel(Shape(middle, x.end()))}});
}

void squeeze_infer(Inference& i) {
  Shape to = i.shape(0);
  const Ints axes = sorted_axes(i.integers("axes"), to.size());
  for (std::size_t k = axes.size(); k-- > 0;) {
    const auto at = to.begin() + axes[k];
    i.require(!differ(*at, 1), "axis ", axes[k], " has size ", *at, ", not 1");
    to.erase(at);
  }
  i.y({i.x(0).dtype, to});
}

void unsqueeze_infer(Inference& i) {
  Shape to = i.shape(0);
  for (const std::int64_t axis : sorted_axes(i.integers("axes"), to.size() + i.integers("axes").size()))
    to.insert(to.begin() + axis, 1);
  i.y({i.x(0).dtype, to});
}

void decompose_to_reshape(Compose& c) { c.y(reshape(c.x(0), c.out_type().shape)); }

void split_infer(Inference& i) {
  const auto axis = static_cast<std::size_t>(i.integer("axis"));
  i.require(axis < i.rank(0), "axis ", i.integer("axis"), " is out of range");
  Dim total = 0;
  for (const Dim& size : i.dims("split")) {
    Shape to = i.shape(0);
    to[axis] = size;
    total += size;
    i.y({i.x(0).dtype, to});
  }
  i.require(!differ(total, i.shape(0)[axis]), "the parts add up to ", total, ", the axis has ",
            i.shape(0)[axis]);
}

void split_decompose(Compose& c) {
  Dim start = 0;
  const Dims parts = c.dims("split");
  for (std::size_t k = 0; k < parts.size(); ++k) {
    c.y(k, slice(c.x(0), c.integer("axis"), start, start + parts[k]));
    start += parts[k];
  }
}

// ---- import

/// 0 copies the input's size (unless allowzero), -1 is what remains.
void import_reshape(OnnxNode& n) {
  const Shape& x = n.type(0).shape;
  Dims to = n.ints(1, "shape");
  const bool zero_copies = n.integer("allowzero", 0) == 0;
  std::optional<std::size_t> rest;
  Dim known = 1;
  for (std::size_t k = 0; k < to.size(); ++k) {
    if (to[k] == Dim(0) && zero_copies) {
      if (k >= x.size())
        throw Error(cat("Reshape: 0 at place ", k, " of ", shape_str(to), " copies from ", n.type(0)));
      to[k] = x[k];
    }
    if (to[k] == Dim(-1)) {
      if (rest) throw Error(cat("Reshape: -1 occurs twice in ", shape_str(to)));
      rest = k;
    } else {
      known *= to[k];
    }
  }
  if (rest) {
    if (known == Dim(0)) throw Error(cat("Reshape: -1 beside 0 in ", shape_str(to), " is ambiguous"));
    const std::optional<Dim> exact = exact_div(numel(x), known);
    to[*rest] = exact ? *exact : floor_div(numel(x), known);
  }
  n.y(call("Reshape", {n.x(0)}, {{"shape", make_attr(to)}}));
}

void import_transpose(OnnxNode& n) {
  Ints reversed = all_axes(n.rank(0));
  std::reverse(reversed.begin(), reversed.end());
  n.y(transpose(n.x(0), n.integers("perm", reversed)));
}

void import_expand(OnnxNode& n) {
  n.y(call("Expand", {n.x(0)}, {{"shape", make_attr(broadcast(n.type(0).shape, n.ints(1, "shape")))}}));
}

void import_concat(OnnxNode& n) {
  std::vector<Expr> inputs;
  for (std::size_t k = 0; k < n.inputs.size(); ++k) inputs.push_back(n.x(k));
  n.y(call("Concat", inputs, {{"axis", normal_axis(n.integer("axis", 1), n.rank(0))}}));
}

void import_flatten(OnnxNode& n) { n.y(call("Flatten", {n.x(0)}, {{"axis", n.integer("axis", 1)}})); }

void import_squeeze(OnnxNode& n) {
  const std::optional<Dims> given = n.attr_or_input("axes", 1);
  Ints axes = given ? constants(*given, "Squeeze: axes") : Ints{};
  for (std::size_t k = 0; !given && k < n.rank(0); ++k)
    if (n.type(0).shape[k] == Dim(1)) axes.push_back(static_cast<std::int64_t>(k));
  n.y(call("Squeeze", {n.x(0)}, {{"axes", sorted_axes(axes, n.rank(0))}}));
}

void import_unsqueeze(OnnxNode& n) {
  const std::optional<Dims> given = n.attr_or_input("axes", 1);
  if (!given) throw Error("Unsqueeze: axes are missing");
  const Ints axes = constants(*given, "Unsqueeze: axes");
  n.y(call("Unsqueeze", {n.x(0)}, {{"axes", sorted_axes(axes, n.rank(0) + axes.size())}}));
}

/// A start or end of ONNX's Slice: negative ones count from the end, all are clamped to lowest..highest.
/// Symbolic sizes are taken to be large enough; that is checked when they are bound.
Dim slice_bound(const Dim& given, const Dim& size, std::int64_t lowest, const Dim& highest) {
  constexpr std::int64_t kHuge =
      std::numeric_limits<std::int32_t>::max();  // "to the end", in files of 32-bit exporters
  if (!given.is_constant()) return given;
  const std::int64_t value = given.value();
  if (value >= kHuge) return highest;
  if (value <= -kHuge) return lowest;
  if (!size.is_constant()) return value < 0 ? size + value : given;
  return std::clamp(value < 0 ? value + size.value() : value, lowest, highest.value());
}

void import_slice(OnnxNode& n) {
  const bool attributes = n.opset < 10;
  const auto given = [&](std::string_view name, std::size_t input) {
    return attributes ? to_shape(n.integers(name, {})) : n.ints(input, name);
  };
  const Dims starts = given("starts", 1), ends = given("ends", 2);
  Ints axes = all_axes(starts.size());
  if (attributes ? n.has_attr("axes") : n.has(3)) axes = constants(given("axes", 3), "Slice: axes");
  Ints steps(starts.size(), 1);
  if (!attributes && n.has(4)) steps = constants(n.ints(4, "steps"), "Slice: steps");
  if (ends.size() != starts.size() || axes.size() != starts.size() || steps.size() != starts.size())
    throw Error("Slice: starts, ends, axes and steps differ in length");
  Dims first, last;
  for (std::size_t k = 0; k < axes.size(); ++k) {
    axes[k] = normal_axis(axes[k], n.rank(0));
    if (steps[k] == 0) throw Error("Slice: a step is 0");
    const Dim& size = n.type(0).shape[static_cast<std::size_t>(axes[k])];
    if (size == Dim(0)) steps[k] = 1;  // nothing to walk over backwards
    const bool forward = steps[k] > 0;
    const Dim highest = forward ? size : size - 1;
    first.push_back(slice_bound(starts[k], size, 0, highest));
    last.push_back(slice_bound(ends[k], size, forward ? 0 : -1, highest));
  }
  n.y(call("Slice", {n.x(0)},
           {{"axes", axes}, {"starts", make_attr(first)}, {"ends", make_attr(last)}, {"steps", steps}}));
}

/// Sizes of the parts: attribute or input `split`, or (18) num_outputs equal parts with a smaller last one.
Dims split_sizes(const OnnxNode& n, const Dim& size, std::size_t parts) {
  if (const std::optional<Dims> given = n.attr_or_input("split", 1)) return *given;
  const auto count = n.integer("num_outputs", static_cast<std::int64_t>(parts));
  if (const std::optional<Dim> equal = exact_div(size, count))
    return Dims(static_cast<std::size_t>(count), *equal);
  if (!n.has_attr("num_outputs"))
    throw Error(cat("Split: ", size, " does not divide into ", count, " parts"));
  const Dim part = floor_div(size + (count - 1), count);
  Dims sizes(static_cast<std::size_t>(count), part);
  sizes.back() = size - part * (count - 1);
  return sizes;
}

void import_split(OnnxNode& n) {
  const std::int64_t axis = normal_axis(n.integer("axis", 0), n.rank(0));
  const Dims sizes = split_sizes(n, n.type(0).shape[static_cast<std::size_t>(axis)], n.output_count);
  Dim start = 0;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    if (n.output_used.size() <= k || n.output_used[k]) n.y(k, slice(n.x(0), axis, start, start + sizes[k]));
    start += sizes[k];
  }
}

std::vector<AttrSpec> shape_spec() { return {{"shape", Ints{}, true}}; }

}  // namespace

// clang-format off
static std::vector<OpDef> moving_ops() {
  return {
  {.name = "Reshape",
   .signature = "(x: any) -> y",
   .attrs = shape_spec(),
   .traits = {.in_place = {{0, 0}}},
   .onnx = {.since = 5, .import = import_reshape},
   .infer = reshape_infer,
   .fold_dims = fold_same,
   .gradient = [](Gradient& g) { g.dx(0, reshape(g.dy(), g.type(0).shape)); },
   .samples = {"Reshape(f32[2,3,4]) {shape=[6,4]}", "Reshape(f32[1]) {shape=[]}"}},

  {.name = "Transpose",
   .signature = "(x: any) -> y",
   .attrs = {{"perm", Ints{}, true}},
   .onnx = {.since = 1, .import = import_transpose},
   .infer = transpose_infer,
   .gradient = transpose_gradient,
   .samples = {"Transpose(f32[2,3]) {perm=[1,0]}", "Transpose(f32[2,3,4]) {perm=[2,0,1]}"}},

  {.name = "Expand",
   .signature = "(x: any) -> y",
   .attrs = shape_spec(),
   .onnx = {.since = 8, .import = import_expand},
   .infer = expand_infer,
   .fold_dims = expand_fold,
   .gradient = [](Gradient& g) { g.dx(0, sum_to(g.dy(), g.type(0).shape)); },
   .samples = {"Expand(f32[3,1]) {shape=[2,3,4]}", "Expand(f32[]) {shape=[2,3]}"}},

  {.name = "Concat",
   .signature = "(xs...: any) -> y",
   .attrs = {{"axis", 0, true}},
   .onnx = {.since = 4, .import = import_concat},
   .infer = concat_infer,
   .fold_dims = concat_fold,
   .gradient = concat_gradient,
   .samples = {"Concat(f32[2,3], f32[2,1], f32[2,2]) {axis=1}", "Concat(f32[2,3], f32[1,3]) {axis=0}"}},

  {.name = "Slice",
   .signature = "(x: any) -> y",
   .attrs = {{"axes", Ints{}, true}, {"starts", Ints{}, true}, {"ends", Ints{}, true}, {"steps", Ints{}, true}},
   .onnx = {.since = 1, .import = import_slice},
   .infer = slice_infer,
   .fold_dims = slice_fold,
   .gradient = slice_gradient,
   .samples = {"Slice(f32[4,5]) {axes=[0,1], starts=[1,0], ends=[3,5], steps=[1,2]}",
               "Slice(f32[4,5]) {axes=[1], starts=[4], ends=[-1], steps=[-2]}", "Slice(f32[4,5]) {axes=[0], starts=[3], ends=[0], steps=[-1]}"}},

  {.name = "SumPieces",
   .signature = "(pieces...: float) -> y",
   .attrs = {{"shape", Ints{}, true}, {"starts", Ints{}, true}, {"steps", Ints{}, true}},
   .onnx = {},
   .infer = sum_pieces_infer,
   .gradient = sum_pieces_gradient,
   .samples = {"SumPieces(f32[2,3], f32[2,5]) {shape=[4,5], starts=[1,0,2,0], steps=[1,2,1,1]}",
               "SumPieces(f32[4,3]) {shape=[4,5], starts=[0,4], steps=[1,-2]}"}},

  {.name = "Flatten",
   .signature = "(x: any) -> y",
   .attrs = {{"axis", 1}},
   .onnx = {.since = 1, .import = import_flatten},
   .infer = flatten_infer,
   .fold_dims = fold_same,
   .decompose = decompose_to_reshape,
   .gradient = from_decomposition,
   .samples = {"Flatten(f32[2,3,4])", "Flatten(f32[2,3,4]) {axis=-1}", "Flatten(f32[2,3]) {axis=0}"}},

  {.name = "Squeeze",
   .signature = "(x: any) -> y",
   .attrs = {{"axes", Ints{}, true}},
   .onnx = {.since = 1, .import = import_squeeze},
   .infer = squeeze_infer,
   .fold_dims = fold_same,
   .decompose = decompose_to_reshape,
   .gradient = from_decomposition,
   .samples = {"Squeeze(f32[1,3,1]) {axes=[0,2]}"}},

  {.name = "Unsqueeze",
   .signature = "(x: any) -> y",
   .attrs = {{"axes", Ints{}, true}},
   .onnx = {.since = 1, .import = import_unsqueeze},
   .infer = unsqueeze_infer,
   .fold_dims = fold_same,
   .decompose = decompose_to_reshape,
   .gradient = from_decomposition,
   .samples = {"Unsqueeze(f32[3,2]) {axes=[0,2]}"}},

  {.name = "Split",
   .signature = "(x: any) -> ys...",
   .attrs = {{"axis", 0, true}, {"split", Ints{}, true}},
   .onnx = {.since = 2, .import = import_split},
   .infer = split_infer,
   .decompose = split_decompose,
   .gradient = from_decomposition,
   .samples = {"Split(f32[2,5]) {axis=1, split=[2,3]}"}},
  };
}
// clang-format on

std::span<const OpDef> layout_ops() {
  static const std::vector<OpDef> ops = moving_ops();
  return ops;
}

}  // namespace onnxddp

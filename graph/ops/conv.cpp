// Convolution and pooling over two spatial axes, with their gradients. One-dimensional forms are reshaped at
// import.
#include <algorithm>

#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

constexpr std::size_t kSpatial = 2;  // H and W, axes 2 and 3

/// Kernel, strides, pads [top, left, bottom, right] and dilations of a convolution or pooling.
struct Window {
  Ints kernel, strides, pads, dilations;
  std::int64_t extent(std::size_t k) const { return dilations[k] * (kernel[k] - 1) + 1; }
};

Window read_window(const Inference& i, Ints kernel) {
  Window w{std::move(kernel), i.integers("strides"), i.integers("pads"), i.integers("dilations")};
  i.require(w.kernel.size() == kSpatial && w.strides.size() == kSpatial && w.dilations.size() == kSpatial &&
                w.pads.size() == 2 * kSpatial,
            "kernel, strides, dilations need 2 numbers and pads 4");
  const auto all_at_least = [](const Ints& numbers, std::int64_t least) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [least](std::int64_t number) { return number >= least; });
  };
  i.require(all_at_least(w.kernel, 1) && all_at_least(w.strides, 1) && all_at_least(w.dilations, 1),
            "kernel, strides and dilations must be positive");
  i.require(all_at_least(w.pads, 0), "pads must not be negative");
  return w;
}

/// Number of windows along spatial axis k of an input of that size. With ceil_mode the last window may reach
/// beyond the padded input, but must start inside the input or its leading pads.
Dim output_size(const Inference& i, const Window& w, std::size_t k, const Dim& size, bool ceil_mode) {
  const std::int64_t stride = w.strides[k], before = w.pads[k], after = w.pads[k + kSpatial];
  const Dim room = size + (before + after - w.extent(k));
  if (room.is_constant() && room.value() < 0)
    i.fail("a window of ", w.extent(k), " does not fit into ", size, " with pads ", before, " and ", after);
  if (!ceil_mode || stride == 1) return floor_div(room, stride) + 1;
  const Dim last = floor_div(room + (stride - 1), stride);
  if (stride <= w.extent(k) - after) return last + 1;  // the last window cannot start in the trailing pads
  i.require(size.is_constant(), "ceil_mode with pads needs a fixed size, here it is ", size);
  return last.value() * stride >= size.value() + before ? last : last + 1;
}

Shape window_output(const Inference& i, const Window& w, Shape x, const Dim& channels, bool ceil_mode) {
  x[1] = channels;
  for (std::size_t k = 0; k < kSpatial; ++k) x[k + 2] = output_size(i, w, k, x[k + 2], ceil_mode);
  return x;
}

Ints kernel_of(const Inference& i, const Shape& weight) {
  i.require(is_static(Shape(weight.begin() + 2, weight.end())), "the kernel size must be known");
  return {weight[2].value(), weight[3].value()};
}

// ---- Conv

void check_conv(const Inference& i, const Shape& x, const Shape& w) {
  i.require(x.size() == 4 && w.size() == 4, "x and w need 4 dimensions");
  const std::int64_t group = i.integer("group");
  i.require(group >= 1, "group must be positive");
  i.require(!differ(x[1], w[1] * group), "expects ", w[1] * group, " input channels, x has ", x[1],
            " (group=", group, ")");
  i.require(!w[0].is_constant() || w[0].value() % group == 0, w[0],
            " output channels do not divide by group=", group);
}

void conv_infer(Inference& i) {
  const Shape &x = i.shape(0), &w = i.shape(1);
  i.require(i.x(0).dtype == i.x(1).dtype && (!i.has(2) || i.x(2).dtype == i.x(0).dtype),
            "the element types differ");
  check_conv(i, x, w);
  if (i.has(2)) i.require(i.rank(2) == 1 && !differ(i.shape(2)[0], w[0]), "the bias must be [", w[0], "]");
  i.y({i.x(0).dtype, window_output(i, read_window(i, kernel_of(i, w)), x, w[0], false)});
}

void conv_data_grad_infer(Inference& i) {
  const Shape x = i.dims("shape"), &dy = i.shape(0), &w = i.shape(1);
  check_conv(i, x, w);
  const Shape expected = window_output(i, read_window(i, kernel_of(i, w)), x, w[0], false);
  i.require(!differ(dy, expected), "dy should be ", shape_str(expected));
  i.y({i.x(0).dtype, x});
}

void conv_weight_grad_infer(Inference& i) {
  const Shape w = i.dims("shape"), &dy = i.shape(0), &x = i.shape(1);
  check_conv(i, x, w);
  const Shape expected = window_output(i, read_window(i, kernel_of(i, w)), x, w[0], false);
  i.require(!differ(dy, expected), "dy should be ", shape_str(expected));
  i.y({i.x(0).dtype, w});
}

void conv_gradient(Gradient& g) {
  const Expr dy = g.dy();
  g.dx(0, call("ConvDataGrad", {dy, g.x(1)}, with(g.attrs(), {{"shape", make_attr(g.type(0).shape)}})));
  g.dx(1, call("ConvWeightGrad", {dy, g.x(0)}, with(g.attrs(), {{"shape", make_attr(g.type(1).shape)}})));
  if (g.has(2)) g.dx(2, reduce_sum(dy, {0, 2, 3}, false));
}

Dim conv_flops(const Inference& i) {
  const Shape& w = i.shape(1);
  const Shape y = window_output(i, read_window(i, kernel_of(i, w)), i.shape(0), w[0], false);
  return 2 * numel(y) * w[1] * w[2] * w[3];
}

/// The two gradients do as much work as the forward pass.
Dim conv_grad_flops(const Inference& i, const Shape& w) { return 2 * numel(i.shape(0)) * w[1] * w[2] * w[3]; }

// ---- pooling

void pool_infer(Inference& i) {
  i.require(i.rank(0) == 4, "x needs 4 dimensions");
  const Window w = read_window(i, i.integers("kernel_shape"));
  for (std::size_t k = 0; k < kSpatial; ++k)
    i.require(w.pads[k] < w.extent(k) && w.pads[k + kSpatial] < w.extent(k),
              "pads must be smaller than the window");
  i.y({i.x(0).dtype, window_output(i, w, i.shape(0), i.shape(0)[1], i.flag("ceil_mode"))});
}

void pool_grad_check(const Inference& i, const Shape& x) {
  i.require(x.size() == 4, "x needs 4 dimensions");
  const Shape expected =
      window_output(i, read_window(i, i.integers("kernel_shape")), x, x[1], i.flag("ceil_mode"));
  i.require(!differ(i.shape(0), expected), "dy should be ", shape_str(expected));
}

void max_pool_grad_infer(Inference& i) {
  pool_grad_check(i, i.shape(1));
  i.y(i.x(1));
}

void average_pool_grad_infer(Inference& i) {
  const Shape x = i.dims("shape");
  pool_grad_check(i, x);
  i.y({i.x(0).dtype, x});
}

Dim pool_flops(const Inference& i) {
  const Window w = read_window(i, i.integers("kernel_shape"));
  return numel(window_output(i, w, i.shape(0), i.shape(0)[1], i.flag("ceil_mode"))) * numel(w.kernel);
}

void global_average_infer(Inference& i) {
  i.require(i.rank(0) >= 3, "x needs at least one spatial dimension");
  Ints axes = all_axes(i.rank(0));
  axes.erase(axes.begin(), axes.begin() + 2);
  i.y({i.x(0).dtype, kept(i.shape(0), axes)});
}

void global_average_decompose(Compose& c) {
  Ints axes = all_axes(c.type(0).shape.size());
  axes.erase(axes.begin(), axes.begin() + 2);
  c.y(reduce_mean(c.x(0), axes, true));
}

// ---- import

/// x with a height of 1 in front of the length: 1-D becomes 2-D.
Expr with_height(Expr x) {
  Shape shape = x.shape();
  shape.insert(shape.begin() + 2, 1);
  return reshape(x, shape);
}

Expr without_height(Expr x) {
  Shape shape = x.shape();
  shape.erase(shape.begin() + 2);
  return reshape(x, shape);
}

std::size_t spatial_rank(const OnnxNode& n) {
  if (n.rank(0) < 3) throw Error(cat(n.op_type, " needs an input of rank 3 or more, not ", n.type(0)));
  const std::size_t spatial = n.rank(0) - 2;
  if (spatial > 2) throw Error(cat(n.op_type, ": not supported yet: ", spatial, "-D (", n.type(0), ")"));
  return spatial;
}

Ints numbers_for(const OnnxNode& n, std::string_view name, std::size_t count, std::int64_t otherwise) {
  Ints numbers = n.integers(name, Ints(count, otherwise));
  if (numbers.size() != count)
    throw Error(cat(n.op_type, ": ", name, " needs ", count, " numbers, has ", numbers.size()));
  return numbers;
}

/// Pads of auto_pad SAME_UPPER and SAME_LOWER: the output has ceil(size / stride) elements.
void pad_same(const OnnxNode& n, Window& w, std::size_t k, bool upper) {
  const std::size_t spatial = w.kernel.size();
  const Dim& size = n.type(0).shape[k + 2];
  const std::int64_t stride = w.strides[k];
  std::int64_t total = w.extent(k) - stride;  // enough where the size divides by the stride
  if (stride != 1) {
    if (!size.is_constant())
      throw Error(cat(n.op_type, ": auto_pad with stride ", stride, " needs a fixed size, here it is ", size))
          .hint("give the size with --dim NAME=VALUE");
    const std::int64_t out = (size.value() + stride - 1) / stride;
    total = (out - 1) * stride + w.extent(k) - size.value();
  }
  total = std::max<std::int64_t>(total, 0);
  w.pads[k] = upper ? total / 2 : total - total / 2;
  w.pads[k + spatial] = total - w.pads[k];
}

/// The window of an ONNX node over `kernel.size()` axes, auto_pad resolved.
Window import_window(const OnnxNode& n, const Ints& kernel) {
  const std::size_t spatial = kernel.size();
  Window w{kernel, numbers_for(n, "strides", spatial, 1), numbers_for(n, "pads", 2 * spatial, 0),
           numbers_for(n, "dilations", spatial, 1)};
  const std::string mode = n.text("auto_pad", "NOTSET");
  if (mode == "NOTSET" || mode.empty()) return w;
  if (mode != "SAME_UPPER" && mode != "SAME_LOWER" && mode != "VALID")
    throw Error(cat(n.op_type, ": unknown auto_pad '", mode, "'"));
  std::fill(w.pads.begin(), w.pads.end(), 0);
  for (std::size_t k = 0; k < spatial && mode != "VALID"; ++k) pad_same(n, w, k, mode == "SAME_UPPER");
  return w;
}

/// A window over the length as one over height 1 and length.
Window with_height(Window w) {
  for (Ints* numbers : {&w.kernel, &w.strides, &w.dilations}) numbers->insert(numbers->begin(), 1);
  w.pads = {0, w.pads[0], 0, w.pads[1]};
  return w;
}

Attrs window_attrs(const Window& w) {
  return {{"strides", w.strides}, {"pads", w.pads}, {"dilations", w.dilations}};
}

void import_conv(OnnxNode& n) {
  const std::size_t spatial = spatial_rank(n);
  const Shape& weight = n.type(1).shape;
  if (weight.size() != spatial + 2)
    throw Error(cat("Conv of ", n.type(0), " needs a weight of rank ", spatial + 2, ", not ", n.type(1)));
  const Ints kernel = constants(Shape(weight.begin() + 2, weight.end()), "Conv: kernel size");
  if (n.integers("kernel_shape", kernel) != kernel)
    throw Error(cat("Conv: kernel_shape ", shape_str(n.integers("kernel_shape", {})),
                    " contradicts the weight ", n.type(1)));
  Window w = import_window(n, kernel);
  std::vector<Expr> inputs{n.x(0), n.x(1)};
  if (spatial == 1) {
    w = with_height(w);
    for (Expr& input : inputs) input = with_height(input);
  }
  if (n.has(2)) inputs.push_back(n.x(2));
  const Expr y = call("Conv", inputs, with(window_attrs(w), {{"group", n.integer("group", 1)}}));
  n.y(spatial == 1 ? without_height(y) : y);
}

void import_pool(OnnxNode& n) {
  const std::size_t spatial = spatial_rank(n);
  if (n.output_used.size() > 1 && n.output_used[1])
    throw Error(cat(n.op_type, ": the output Indices is not supported"));
  const Ints kernel = n.integers("kernel_shape", {});
  if (kernel.size() != spatial) throw Error(cat(n.op_type, ": kernel_shape needs ", spatial, " numbers"));
  Window w = import_window(n, kernel);
  if (spatial == 1) w = with_height(w);
  Attrs attrs = with(window_attrs(w), {{"kernel_shape", w.kernel}, {"ceil_mode", n.integer("ceil_mode", 0)}});
  if (n.op_type == "AveragePool") attrs["count_include_pad"] = n.integer("count_include_pad", 0);
  const Expr y = call(n.op_type, {spatial == 1 ? with_height(n.x(0)) : n.x(0)}, attrs);
  n.y(spatial == 1 ? without_height(y) : y);
}

// ---- attributes

std::vector<AttrSpec> window_specs() {
  return {{"strides", Ints{1, 1}}, {"pads", Ints{0, 0, 0, 0}}, {"dilations", Ints{1, 1}}};
}

std::vector<AttrSpec> conv_specs(bool with_shape) {
  std::vector<AttrSpec> specs = window_specs();
  specs.push_back({"group", 1});
  if (with_shape) specs.push_back({"shape", Ints{}, true});
  return specs;
}

std::vector<AttrSpec> pool_specs(bool average, bool with_shape) {
  std::vector<AttrSpec> specs = window_specs();
  specs.push_back({"kernel_shape", Ints{}, true});
  specs.push_back({"ceil_mode", 0});
  if (average) specs.push_back({"count_include_pad", 0});
  if (with_shape) specs.push_back({"shape", Ints{}, true});
  return specs;
}

}  // namespace

// clang-format off
std::span<const OpDef> conv_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "Conv",
   .signature = "(x: float, w: float, b?: float) -> y",
   .attrs = conv_specs(false),
   .onnx = {.since = 1, .import = import_conv},
   .infer = conv_infer,
   .gradient = conv_gradient,
   .flops = conv_flops,
   .samples = {"Conv(f32[2,3,5,5], f32[4,3,3,3])", "Conv(f32[2,3,5,5], f32[4,3,3,3], f32[4]) {pads=[1,1,1,1]}",
               "Conv(f32[2,3,6,5], f32[4,3,3,2]) {strides=[2,1], pads=[0,1,1,0]}",
               "Conv(f32[2,4,5,5], f32[6,2,3,3], f32[6]) {group=2, pads=[1,1,1,1], strides=[2,2]}",
               "Conv(f32[2,4,5,5], f32[4,1,3,3]) {group=4, pads=[1,1,1,1]}",
               "Conv(f32[1,2,7,7], f32[3,2,3,3]) {dilations=[2,2], pads=[2,1,0,2]}", "Conv(f32[2,3,4,4], f32[5,3,1,1]) {strides=[2,2]}"}},

  {.name = "ConvDataGrad",
   .signature = "(dy: float, w: float) -> dx",
   .attrs = conv_specs(true),
   .onnx = {},
   .infer = conv_data_grad_infer,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return conv_grad_flops(i, i.shape(1)); },
   .samples = {"ConvDataGrad(f32[2,4,3,3], f32[4,3,3,3]) {shape=[2,3,5,5]}",
               "ConvDataGrad(f32[2,4,3,3], f32[4,1,3,3]) {shape=[2,4,5,5], group=4, strides=[2,2], pads=[1,1,1,1]}"}},

  {.name = "ConvWeightGrad",
   .signature = "(dy: float, x: float) -> dw",
   .attrs = conv_specs(true),
   .onnx = {},
   .infer = conv_weight_grad_infer,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return conv_grad_flops(i, i.dims("shape")); },
   .samples = {"ConvWeightGrad(f32[2,4,3,3], f32[2,3,5,5]) {shape=[4,3,3,3]}",
               "ConvWeightGrad(f32[2,6,3,3], f32[2,4,5,5]) {shape=[6,2,3,3], group=2, strides=[2,2], pads=[1,1,1,1]}"}},

  {.name = "MaxPool",  // pads never win; the first maximum in window order does
   .signature = "(x: float) -> y",
   .attrs = pool_specs(false, false),
   .onnx = {.since = 1, .import = import_pool},
   .infer = pool_infer,
   .gradient = [](Gradient& g) { g.dx(0, call("MaxPoolGrad", {g.dy(), g.x(0)}, g.attrs())); },
   .flops = pool_flops,
   .samples = {"MaxPool(f32[2,3,4,4]) {kernel_shape=[2,2], strides=[2,2]}",
               "MaxPool(f32[2,3,5,6]) {kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]}",
               "MaxPool(f32[1,2,6,6]) {kernel_shape=[3,2], strides=[2,3], ceil_mode=1}",
               "MaxPool(f32[1,2,7,7]) {kernel_shape=[2,3], dilations=[2,2], pads=[0,1,1,0]}"}},

  {.name = "MaxPoolGrad",
   .signature = "(dy: float, x: float) -> dx",
   .attrs = pool_specs(false, false),
   .onnx = {},
   .infer = max_pool_grad_infer,
   .gradient = not_differentiable,
   .samples = {"MaxPoolGrad(f32[2,3,3,3], f32[2,3,5,6]) {kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]}"}},

  {.name = "AveragePool",
   .signature = "(x: float) -> y",
   .attrs = pool_specs(true, false),
   .onnx = {.since = 1, .import = import_pool},
   .infer = pool_infer,
   .gradient = [](Gradient& g) {
     g.dx(0, call("AveragePoolGrad", {g.dy()}, with(g.attrs(), {{"shape", make_attr(g.type(0).shape)}})));
   },
   .flops = pool_flops,
   .samples = {"AveragePool(f32[2,3,4,4]) {kernel_shape=[2,2], strides=[2,2]}",
               "AveragePool(f32[2,3,5,6]) {kernel_shape=[3,3], strides=[2,2], pads=[1,0,1,1]}",
               "AveragePool(f32[2,3,5,6]) {kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1}",
               "AveragePool(f32[1,2,6,6]) {kernel_shape=[3,3], strides=[2,2], ceil_mode=1, count_include_pad=1, pads=[0,0,1,1]}"}},

  {.name = "AveragePoolGrad",
   .signature = "(dy: float) -> dx",
   .attrs = pool_specs(true, true),
   .onnx = {},
   .infer = average_pool_grad_infer,
   .gradient = not_differentiable,
   .samples = {"AveragePoolGrad(f32[2,3,3,3]) {shape=[2,3,5,6], kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]}"}},

  {.name = "GlobalAveragePool",
   .signature = "(x: float) -> y",
   .onnx = {.since = 1},
   .infer = global_average_infer,
   .decompose = global_average_decompose,
   .gradient = from_decomposition,
   .samples = {"GlobalAveragePool(f32[2,3,4,4])", "GlobalAveragePool(f32[2,3,4])"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

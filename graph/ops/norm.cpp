// Batch normalization and its statistics, Softmax, LogSoftmax, Dropout.
#include "graph/names.h"
#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

// ---- batch normalization. stats = mean[C], M2[C], count_hi, count_lo; count = hi * 2^20 + lo.

Dim stats_size(const Dim& channels) { return 2 * channels + 2; }

const Dim& channels_of(const Inference& i, std::size_t k) {
  i.require(i.rank(k) >= 2, "x needs a channel axis 1");
  return i.shape(k)[1];
}

/// Input k must be a vector of `size` elements of input 0's type.
void require_vector(const Inference& i, std::size_t k, const Dim& size, std::string_view what) {
  i.require(i.rank(k) == 1 && !differ(i.shape(k)[0], size), what, " must be [", size, "], not ",
            shape_str(i.shape(k)));
  i.require(i.x(k).dtype == i.x(0).dtype, what, " has another element type");
}

void batch_norm_infer(Inference& i) {
  const Dim& channels = channels_of(i, 0);
  constexpr std::string_view kNames[] = {"scale", "bias", "mean", "var"};
  for (std::size_t k = 1; k <= 4; ++k) require_vector(i, k, channels, kNames[k - 1]);
  i.y(i.x(0));
  i.y(i.x(3));
  i.y(i.x(4));
}

void batch_norm_decompose(Compose& c) {
  Builder& b = c.builder();
  const bool training = c.flag("training");
  const auto role = [&](std::size_t i, const char* suffix) {
    return b.graph().unique_name(b.graph().value(c.x(i).id()).name + suffix);
  };
  const Expr stats = training ? b.call("BatchStats", {c.x(0)}, {}, role(0, ".stats"))
                              : b.call("FixedStats", {c.x(3), c.x(4)}, {}, role(3, ".stats"));
  c.y(0, call("BatchNormApply", {c.x(0), c.x(1), c.x(2), stats}, {{"epsilon", c.number("epsilon")}}));
  if (!training) {
    c.y(1, c.x(3));
    c.y(2, c.x(4));
  } else if (c.results().size() > 1) {
    const std::vector<ValueId> next =
        b.emit("RunningStats", {c.x(3).id(), c.x(4).id(), stats.id()},
               {{"momentum", c.number("momentum")}, {"unbiased", c.integer("unbiased")}},
               {role(3, ".next"), role(4, ".next")});
    c.y(1, b.expr(next[0]));
    c.y(2, b.expr(next[1]));
  }
}

void batch_stats_infer(Inference& i) { i.y({i.x(0).dtype, {stats_size(channels_of(i, 0))}}); }

void fixed_stats_infer(Inference& i) {
  i.require(i.rank(0) == 1, "mean must be a vector");
  require_vector(i, 1, i.shape(0)[0], "var");
  i.y({i.x(0).dtype, {stats_size(i.shape(0)[0])}});
}

void merge_stats_infer(Inference& i) {
  i.require(i.rank(0) == 2, "the statistics of all ranks must be a matrix");
  i.y({i.x(0).dtype, {i.shape(0)[1]}});
}

void batch_norm_apply_infer(Inference& i) {
  const Dim& channels = channels_of(i, 0);
  require_vector(i, 1, channels, "scale");
  require_vector(i, 2, channels, "bias");
  require_vector(i, 3, stats_size(channels), "stats");
  i.y(i.x(0));
}

/// With batch statistics the gradient of x includes the path through them, so that stats itself receives
/// none.
void batch_norm_apply_gradient(Gradient& g) {
  const Attrs epsilon{{"epsilon", g.number("epsilon")}};
  Builder& b = g.builder();
  const std::vector<ValueId> sums =
      b.emit("BatchNormGradSums", {g.dy().id(), g.x(0).id(), g.x(3).id()}, epsilon);
  const Expr dbias = b.expr(sums[0]), dscale = b.expr(sums[1]);
  std::vector<Expr> inputs{g.dy(), g.x(0), g.x(1), g.x(3)};
  if (g.head(3) == "BatchStats" || g.head(3) == "MergeStats") inputs.insert(inputs.end(), {dbias, dscale});
  g.dx(0, call("BatchNormGradApply", inputs, epsilon));
  g.dx(1, dscale);
  g.dx(2, dbias);
}

void running_stats_infer(Inference& i) {
  i.require(i.rank(0) == 1, "mean must be a vector");
  require_vector(i, 1, i.shape(0)[0], "var");
  require_vector(i, 2, stats_size(i.shape(0)[0]), "stats");
  i.y(i.x(0));
  i.y(i.x(1));
}

void grad_sums_infer(Inference& i) {
  i.require(!differ(i.shape(0), i.shape(1)), "dy and x differ in shape");
  const Dim& channels = channels_of(i, 1);
  require_vector(i, 2, stats_size(channels), "stats");
  i.y({i.x(0).dtype, {channels}});
  i.y({i.x(0).dtype, {channels}});
}

void grad_apply_infer(Inference& i) {
  i.require(!differ(i.shape(0), i.shape(1)), "dy and x differ in shape");
  const Dim& channels = channels_of(i, 1);
  require_vector(i, 2, channels, "scale");
  require_vector(i, 3, stats_size(channels), "stats");
  i.require(i.has(4) == i.has(5), "dbias and dscale come together");
  if (i.has(4)) require_vector(i, 4, channels, "dbias");
  if (i.has(5)) require_vector(i, 5, channels, "dscale");
  i.y(i.x(0));
}

std::vector<AttrSpec> epsilon_spec() { return {{"epsilon", 1e-5}}; }

/// ONNX says y = f(mean, var) or trains by training_mode (14) or by the number of outputs (7, 9). Which of
/// the two a model's batch norms are is decided by --bn, not by this node.
void import_batch_norm(OnnxNode& n) {
  if (n.opset < 9 && n.integer("spatial", 1) != 1)
    throw Error("BatchNormalization with spatial=0 is not supported");
  for (std::size_t k = 3; k < n.output_used.size(); ++k)
    if (n.output_used[k])
      throw Error("BatchNormalization: the outputs saved_mean and saved_var are not supported");
  Attrs attrs{{"epsilon", n.number("epsilon", 1e-5)},
              {"momentum", n.number("momentum", 0.9)},
              {"training", std::int64_t{n.batch_norm_train}},
              {"unbiased", std::int64_t{n.batch_norm_unbiased}}};
  std::vector<ValueId> inputs;
  for (std::size_t k = 0; k < 5; ++k) inputs.push_back(n.x(k).id());
  const std::vector<ValueId> y =
      n.b.emit("BatchNormalization", inputs, std::move(attrs), {}, n.batch_norm_train ? 3 : 1);
  n.y(n.b.expr(y[0]));
  for (std::size_t k = 1; k < 3; ++k) {
    const ValueId running = inputs[k + 2];
    if (k < n.output_used.size() && n.output_used[k]) n.y(k, n.b.expr(n.batch_norm_train ? y[k] : running));
    const Kind kind = n.b.graph().value(running).kind;
    if (n.batch_norm_train && (kind == Kind::state || kind == Kind::param))
      n.updates.push_back({running, y[k]});
  }
}

// ---- Softmax, LogSoftmax

void softmax_infer(Inference& i) {
  const std::int64_t axis = i.integer("axis");
  i.require(axis >= 0 && axis < static_cast<std::int64_t>(i.rank(0)), "axis ", axis, " is out of range");
  i.y(i.x(0));
}

Expr sum_along(Expr x, std::int64_t axis) { return reduce_sum(x, {axis}, true); }

void softmax_gradient(Gradient& g) {
  const Expr y = g.y(), dy = g.dy();
  g.dx(0, y * (dy - sum_along(y * dy, g.integer("axis"))));
}

void log_softmax_gradient(Gradient& g) {
  g.dx(0, g.dy() - exp(g.y()) * sum_along(g.dy(), g.integer("axis")));
}

/// x minus its maximum along the axis.
Expr shifted(const Compose& c) {
  return c.x(0) - call("ReduceMax", {c.x(0)}, {{"axes", Ints{c.integer("axis")}}});
}

void softmax_decompose(Compose& c) {
  const Expr e = exp(shifted(c));
  c.y(e / sum_along(e, c.integer("axis")));
}

void log_softmax_decompose(Compose& c) {
  const Expr x = shifted(c);
  c.y(x - log(sum_along(exp(x), c.integer("axis"))));
}

/// Before opset 13 the axes from `axis` on are one: a different function unless the others have size 1.
void import_softmax(OnnxNode& n) {
  const bool flattens = n.opset < 13;
  const Expr x = n.x(0);
  const std::int64_t axis = normal_axis(n.integer("axis", flattens ? 1 : -1), x.rank());
  const Shape& shape = x.shape();
  const Shape before(shape.begin(), shape.begin() + axis), after(shape.begin() + axis + 1, shape.end());
  if (!flattens || numel(after) == Dim(1)) return n.y(call(n.op_type, {x}, {{"axis", axis}}));
  const Expr flat = reshape(x, {numel(before), shape[static_cast<std::size_t>(axis)] * numel(after)});
  n.y(reshape(call(n.op_type, {flat}, {{"axis", 1}}), shape));
}

// ---- Dropout. rng = [seed, step, micro_step, rank, world]

void dropout_infer(Inference& i) {
  i.require(i.x(1) == TensorType{DType::i64, {5}}, "rng must be i64[5]");
  i.require(i.number("ratio") >= 0 && i.number("ratio") < 1, "ratio ", number_str(i.number("ratio")),
            " is not in [0, 1)");
  i.require(!i.flag("batch") || i.rank(0) > 0, "a batch needs a first dimension");
  i.y(i.x(0));
  i.y({DType::boolean, i.shape(0)});
}

void dropout_gradient(Gradient& g) {
  const Expr keep = cast(g.y(1), g.dy().dtype());
  g.dx(0, g.dy() * (keep * (1 / (1 - g.number("ratio")))));
}

/// One generator state for all random nodes; each has its own key.
Expr generator(Builder& b) {
  const TensorType type{DType::i64, {5}};
  const ValueId known = b.graph().find("rng");
  if (known && b.graph().value(known).kind == Kind::state && b.graph().value(known).type == type)
    return b.expr(known);
  claim_name(b.graph(), "rng");
  return b.expr(b.graph().add_param("rng", type, Kind::state));
}

/// Whether the first dimension is the batch: then element r of the batch has the same mask on any number of
/// ranks.
bool is_batch(const Shape& shape) {
  if (shape.empty()) return false;
  const std::set<std::string> symbols = shape[0].symbols();
  return symbols.size() == 1 && shape[0] == Dim::symbol(*symbols.begin());
}

void import_dropout(OnnxNode& n) {
  double ratio = n.number("ratio", 0.5);
  if (n.opset >= 12 && n.has(1)) ratio = n.constant(1, "ratio");
  const bool wants_mask = n.output_used.size() > 1 && n.output_used[1];
  if (!n.training || ratio == 0) {
    n.y(n.x(0));
    if (wants_mask) n.y(1, expand(n.b.scalar(DType::boolean, 1), n.type(0).shape));
    return;
  }
  const std::string& name = n.b.hint();
  const auto key = static_cast<std::int64_t>(fnv1a(std::as_bytes(std::span(name.data(), name.size()))));
  const std::vector<ValueId> y =
      n.b.emit("Dropout", {n.x(0).id(), generator(n.b).id()},
               {{"ratio", ratio}, {"key", key}, {"batch", std::int64_t{is_batch(n.type(0).shape)}}});
  n.y(n.b.expr(y[0]));
  if (wants_mask) n.y(1, n.b.expr(y[1]));
}

}  // namespace

// clang-format off
static std::vector<OpDef> batch_norm_ops() {
  return {
  {.name = "BatchNormalization",
   .signature = "(x: float, scale: float, bias: float, mean: float, var: float) -> y, mean.next?, var.next?",
   .attrs = {{"epsilon", 1e-5}, {"momentum", 0.9}, {"training", 0}, {"unbiased", 1}},
   .traits = {.nondifferentiable_outputs = {1, 2}},
   .onnx = {.since = 7, .import = import_batch_norm},
   .infer = batch_norm_infer,
   .decompose = batch_norm_decompose,
   .gradient = from_decomposition,
   .samples = {"BatchNormalization(f32[3,2,4,4], f32[2], f32[2], f32[2], f32[2] in (0.5, 2)) {training=1}",
               "BatchNormalization(f32[5,3], f32[3], f32[3], f32[3], f32[3] in (0.5, 2)) {training=1, unbiased=0, momentum=0.7}",
               "BatchNormalization(f32[3,2,4,4], f32[2], f32[2], f32[2], f32[2] in (0.5, 2)) {epsilon=0.001}"}},

  {.name = "BatchStats",
   .signature = "(x: float) -> stats",
   .onnx = {},
   .infer = batch_stats_infer,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return 4 * numel(i.shape(0)); },
   .samples = {"BatchStats(f32[3,2,4,4])", "BatchStats(f32[5,3])"}},

  {.name = "FixedStats",
   .signature = "(mean: float, var: float) -> stats",
   .onnx = {},
   .infer = fixed_stats_infer,
   .gradient = not_differentiable,
   .samples = {"FixedStats(f32[3], f32[3] in (0.5, 2))"}},

  {.name = "MergeStats",
   .signature = "(all: float) -> stats",
   .onnx = {},
   .infer = merge_stats_infer,
   .gradient = not_differentiable,
   .samples = {"MergeStats(f32[2,6]=[0.5,-1,3,2,0,4,1,0.25,5,1,0,2])", "MergeStats(f32[2,4]=[0.5,3,0,4,0,0,0,0])"}},

  {.name = "BatchNormApply",
   .signature = "(x: float, scale: float, bias: float, stats: float) -> y",
   .attrs = epsilon_spec(),
   .traits = {.in_place = {{0, 0}}},
   .onnx = {},
   .infer = batch_norm_apply_infer,
   .gradient = batch_norm_apply_gradient,
   .flops = [](const Inference& i) { return 2 * numel(i.shape(0)); },
   .samples = {"BatchNormApply(f32[3,2,2,2], f32[2], f32[2], f32[6]=[0.1,-0.2,5,7,0,12])"}},

  {.name = "RunningStats",
   .signature = "(mean: float, var: float, stats: float) -> mean.next, var.next",
   .attrs = {{"momentum", 0.9}, {"unbiased", 1}},
   .traits = {.in_place = {{0, 0}, {1, 1}}},
   .onnx = {},
   .infer = running_stats_infer,
   .gradient = not_differentiable,
   .samples = {"RunningStats(f32[2], f32[2] in (0.5, 2), f32[6]=[0.1,-0.2,5,7,0,12])",
               "RunningStats(f32[2], f32[2] in (0.5, 2), f32[6]=[0.1,-0.2,5,7,0,12]) {momentum=0.5, unbiased=0}"}},

  {.name = "BatchNormGradSums",
   .signature = "(dy: float, x: float, stats: float) -> dbias, dscale",
   .attrs = epsilon_spec(),
   .onnx = {},
   .infer = grad_sums_infer,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return 4 * numel(i.shape(0)); },
   .samples = {"BatchNormGradSums(f32[3,2,2,2], f32[3,2,2,2], f32[6]=[0.1,-0.2,5,7,0,12])"}},

  {.name = "BatchNormGradApply",
   .signature = "(dy: float, x: float, scale: float, stats: float, dbias?: float, dscale?: float) -> dx",
   .attrs = epsilon_spec(),
   .traits = {.in_place = {{0, 0}}},
   .onnx = {},
   .infer = grad_apply_infer,
   .gradient = not_differentiable,
   .flops = [](const Inference& i) { return 4 * numel(i.shape(0)); },
   .samples = {"BatchNormGradApply(f32[3,2,2,2], f32[3,2,2,2], f32[2], f32[6]=[0.1,-0.2,5,7,0,12], f32[2], f32[2])",
               "BatchNormGradApply(f32[3,2,2,2], f32[3,2,2,2], f32[2], f32[6]=[0.1,-0.2,5,7,0,12])"}},
  };
}

static std::vector<OpDef> softmax_and_dropout_ops() {
  return {
  {.name = "Softmax",
   .signature = "(x: float) -> y",
   .attrs = {{"axis", 0, true}},
   .traits = {.in_place = {{0, 0}}},
   .onnx = {.since = 1, .import = import_softmax},
   .infer = softmax_infer,
   .decompose = softmax_decompose,
   .gradient = softmax_gradient,
   .flops = [](const Inference& i) { return 4 * numel(i.shape(0)); },
   .samples = {"Softmax(f32[3,5]) {axis=1}", "Softmax(f32[2,3,4]) {axis=1}"}},

  {.name = "LogSoftmax",
   .signature = "(x: float) -> y",
   .attrs = {{"axis", 0, true}},
   .traits = {.in_place = {{0, 0}}},
   .onnx = {.since = 1, .import = import_softmax},
   .infer = softmax_infer,
   .decompose = log_softmax_decompose,
   .gradient = log_softmax_gradient,
   .flops = [](const Inference& i) { return 4 * numel(i.shape(0)); },
   .samples = {"LogSoftmax(f32[3,5]) {axis=1}", "LogSoftmax(f32[2,3,4]) {axis=1}"}},

  {.name = "Dropout",
   .signature = "(x: float, rng: int) -> y, mask",
   .attrs = {{"ratio", 0.5}, {"key", 0, true}, {"batch", 0}},
   .traits = {.random = true, .in_place = {{0, 0}}, .nondifferentiable_outputs = {1}},
   .onnx = {.since = 7, .import = import_dropout},
   .infer = dropout_infer,
   .gradient = dropout_gradient,
   .samples = {"Dropout(f32[4,6], i64[5]=[7,3,0,1,2]) {ratio=0.25, key=11}",
               "Dropout(f32[4,2,3], i64[5]=[7,3,0,1,2]) {ratio=0.5, key=11, batch=1}"}},
  };
}
// clang-format on

std::span<const OpDef> norm_ops() {
  static const std::vector<OpDef> ops = [] {
    std::vector<OpDef> all = batch_norm_ops();
    for (OpDef& op : softmax_and_dropout_ops()) all.push_back(std::move(op));
    return all;
  }();
  return ops;
}

}  // namespace onnxddp

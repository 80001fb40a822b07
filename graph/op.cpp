#include "graph/op.h"

#include <algorithm>

#include "graph/attributes.h"

namespace onnxddp {

const Attr& find_attr(const OpDef& op, const Attrs& attrs, std::string_view name) {
  const auto at = attrs.find(name);
  if (at != attrs.end()) return at->second;
  for (const AttrSpec& spec : op.attrs)
    if (spec.name == name) return spec.default_value;
  throw InternalError(cat("op ", op.name, " has no attribute '", name, "'"));
}

namespace {

template <class T>
const T& attr_as(const OpDef& op, const Attrs& attrs, std::string_view name) {
  const Attr& attr = find_attr(op, attrs, name);
  const T* value = std::get_if<T>(&attr);
  CHECK(value != nullptr, "attribute '", name, "' of ", op.name, " has another type");
  return *value;
}

}  // namespace

std::int64_t attr_integer(const OpDef& op, const Attrs& attrs, std::string_view name) {
  return attr_as<std::int64_t>(op, attrs, name);
}
double attr_number(const OpDef& op, const Attrs& attrs, std::string_view name) {
  return attr_as<double>(op, attrs, name);
}
std::string attr_text(const OpDef& op, const Attrs& attrs, std::string_view name) {
  return attr_as<std::string>(op, attrs, name);
}
Ints attr_integers(const OpDef& op, const Attrs& attrs, std::string_view name) {
  const Attr& attr = find_attr(op, attrs, name);
  if (const Dims* dims = std::get_if<Dims>(&attr)) return static_shape(*dims);
  return attr_as<Ints>(op, attrs, name);
}
Dims attr_dimensions(const OpDef& op, const Attrs& attrs, std::string_view name) {
  return attr_dims(find_attr(op, attrs, name));
}

// --- Inference
// -------------------------------------------------------------------------------------------------------

Inference::Inference(const Graph& graph, const OpDef& op, std::span<const ValueId> inputs, const Attrs& attrs)
    : graph_(graph), op_(op), inputs_(inputs), attrs_(attrs) {}

const TensorType& Inference::x(std::size_t i) const {
  CHECK(has(i), op_.name, " reads input ", i);
  return graph_.value(inputs_[i]).type;
}
std::optional<Dims> Inference::ints(std::size_t i) const {
  return has(i) ? graph_.value(inputs_[i]).ints : std::nullopt;
}
bool Inference::has_attr(std::string_view name) const { return attrs_.find(name) != attrs_.end(); }
std::int64_t Inference::integer(std::string_view name) const { return attr_integer(op_, attrs_, name); }
double Inference::number(std::string_view name) const { return attr_number(op_, attrs_, name); }
std::string Inference::text(std::string_view name) const { return attr_text(op_, attrs_, name); }
Ints Inference::integers(std::string_view name) const { return attr_integers(op_, attrs_, name); }
Dims Inference::dims(std::string_view name) const { return attr_dimensions(op_, attrs_, name); }

void Inference::fail_with(const std::string& message) const {
  std::string place;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i]) continue;
    const Value& value = graph_.value(inputs_[i]);
    place += cat(place.empty() ? "" : ", ", value.name, ": ", value.type);
  }
  throw Error(cat(op_.name, ": ", message)).at(place);
}

// --- Gradient
// --------------------------------------------------------------------------------------------------------

Gradient::Gradient(Builder& builder, const Node& node, std::vector<ValueId> output_grads)
    : builder_(builder), node_(node), dys_(std::move(output_grads)) {}

Expr Gradient::x(std::size_t i) const {
  CHECK(has(i), node_.op->name, " gradient reads input ", i);
  return {builder_, node_.inputs[i]};
}
Expr Gradient::y(std::size_t i) const { return {builder_, node_.outputs.at(i)}; }
Expr Gradient::dy(std::size_t i) const {
  CHECK(has_dy(i), node_.op->name, ": no gradient for output ", i);
  return {builder_, dys_[i]};
}
const TensorType& Gradient::type(std::size_t i) const {
  return builder_.graph().value(node_.inputs.at(i)).type;
}
std::string_view Gradient::head(std::size_t i) const {
  const NodeId producer = builder_.graph().value(node_.inputs.at(i)).producer;
  return producer ? std::string_view(builder_.graph().node(producer).op->name) : std::string_view();
}
std::int64_t Gradient::integer(std::string_view name) const {
  return attr_integer(*node_.op, node_.attrs, name);
}
double Gradient::number(std::string_view name) const { return attr_number(*node_.op, node_.attrs, name); }
std::string Gradient::text(std::string_view name) const { return attr_text(*node_.op, node_.attrs, name); }
Ints Gradient::integers(std::string_view name) const { return attr_integers(*node_.op, node_.attrs, name); }
Dims Gradient::dims(std::string_view name) const { return attr_dimensions(*node_.op, node_.attrs, name); }

void Gradient::dx(std::size_t i, Expr gradient) {
  if (!has(i)) return;
  results_.push_back({.input = i, .value = gradient, .axes = {}, .steps = {}, .starts = {}, .ends = {}});
}
void Gradient::dx_piece(std::size_t i, Expr piece, Ints axes, Dims starts, Dims ends, Ints steps) {
  if (!has(i)) return;
  results_.push_back(
      {i, piece, false, std::move(axes), std::move(steps), std::move(starts), std::move(ends)});
}

void zero_almost_everywhere(Gradient& /*g*/) {}
void from_decomposition(Gradient& /*g*/) {
  throw InternalError("an op defined by its decomposition reached autodiff; canonicalise expands it");
}
void not_differentiable(Gradient& /*g*/) { throw InternalError("autodiff must not call this rule"); }

GradientKind gradient_kind(const OpDef& op) {
  using Pointer = void (*)(Gradient&);
  const Pointer* rule = op.gradient.target<Pointer>();
  if (rule == nullptr) return GradientKind::rule;
  if (*rule == &zero_almost_everywhere) return GradientKind::zero;
  if (*rule == &from_decomposition) return GradientKind::decomposition;
  if (*rule == &not_differentiable) return GradientKind::none;
  return GradientKind::rule;
}

// --- Compose
// ---------------------------------------------------------------------------------------------------------

Expr Compose::x(std::size_t i) const {
  CHECK(has(i), node_.op->name, " decomposition reads input ", i);
  return {builder_, node_.inputs[i]};
}
const TensorType& Compose::type(std::size_t i) const {
  return builder_.graph().value(node_.inputs.at(i)).type;
}
const TensorType& Compose::out_type(std::size_t i) const {
  return builder_.graph().value(node_.outputs.at(i)).type;
}
std::int64_t Compose::integer(std::string_view name) const {
  return attr_integer(*node_.op, node_.attrs, name);
}
double Compose::number(std::string_view name) const { return attr_number(*node_.op, node_.attrs, name); }
std::string Compose::text(std::string_view name) const { return attr_text(*node_.op, node_.attrs, name); }
Ints Compose::integers(std::string_view name) const { return attr_integers(*node_.op, node_.attrs, name); }
Dims Compose::dims(std::string_view name) const { return attr_dimensions(*node_.op, node_.attrs, name); }
void Compose::y(std::size_t i, Expr value) {
  if (i < results_.size()) results_[i] = value.id();
}

// --- OnnxNode
// --------------------------------------------------------------------------------------------------------

Expr OnnxNode::x(std::size_t i) const {
  if (!has(i)) throw Error(cat(op_type, ": input ", i, " is missing"));
  return {b, inputs[i]};
}
const TensorType& OnnxNode::type(std::size_t i) const { return x(i).type(); }

namespace {
[[noreturn]] void wrong_type(const OnnxNode& node, std::string_view name) {
  throw Error(cat(node.op_type, ": attribute '", name, "' has the wrong type"));
}
}  // namespace

std::int64_t OnnxNode::integer(std::string_view attr, std::int64_t otherwise) const {
  const auto at = attrs.find(attr);
  if (at == attrs.end()) return otherwise;
  if (const auto* value = std::get_if<std::int64_t>(&at->second)) return *value;
  wrong_type(*this, attr);
}
double OnnxNode::number(std::string_view attr, double otherwise) const {
  const auto at = attrs.find(attr);
  if (at == attrs.end()) return otherwise;
  if (const auto* value = std::get_if<double>(&at->second)) return *value;
  if (const auto* value = std::get_if<std::int64_t>(&at->second)) return static_cast<double>(*value);
  wrong_type(*this, attr);
}
std::string OnnxNode::text(std::string_view attr, std::string otherwise) const {
  const auto at = attrs.find(attr);
  if (at == attrs.end()) return otherwise;
  if (const auto* value = std::get_if<std::string>(&at->second)) return *value;
  wrong_type(*this, attr);
}
Ints OnnxNode::integers(std::string_view attr, Ints otherwise) const {
  const auto at = attrs.find(attr);
  if (at == attrs.end()) return otherwise;
  if (const auto* value = std::get_if<Ints>(&at->second)) return *value;
  wrong_type(*this, attr);
}

Dims OnnxNode::ints(std::size_t i, std::string_view what) const {
  const Value& value = b.graph().value(x(i).id());
  if (value.ints) return *value.ints;
  throw Error(cat(op_type, ": the ", what, " must be known before the run, but '", value.name,
                  "' is computed from data"))
      .at(cat(value.name, ": ", value.type))
      .hint("export the model with constant shapes except for the batch dimension");
}
std::optional<Dims> OnnxNode::attr_or_input(std::string_view attr, std::size_t i) const {
  if (has_attr(attr)) return to_shape(integers(attr, {}));
  if (has(i)) return ints(i, attr);
  return std::nullopt;
}
double OnnxNode::constant(std::size_t i, std::string_view what) const {
  const Value& value = b.graph().value(x(i).id());
  if (value.data && value.data->numel() == 1) {
    return value.type.dtype == DType::f32 ? decimal_of(value.data->data<float>()[0])
                                          : value.data->as_double(0);
  }
  throw Error(cat(op_type, ": the ", what, " must be a constant number"))
      .at(cat(value.name, ": ", value.type));
}
void OnnxNode::y(std::size_t i, Expr value) {
  if (results.size() <= i) results.resize(i + 1);
  results[i] = value.id();
}

// --- Signatures and common rules
// -------------------------------------------------------------------------------------

namespace {

std::vector<Param> parse_params(std::string_view text, bool with_kinds) {
  std::vector<Param> out;
  std::size_t start = 0;
  while (start < text.size()) {
    std::size_t end = text.find(',', start);
    if (end == std::string_view::npos) end = text.size();
    std::string item(text.substr(start, end - start));
    std::erase(item, ' ');
    Param param;
    const std::size_t colon = item.find(':');
    param.kind = colon == std::string::npos ? "any" : item.substr(colon + 1);
    param.name = item.substr(0, colon);
    if (param.name.ends_with("...")) {
      param.variadic = true;
      param.name.resize(param.name.size() - 3);
    } else if (param.name.ends_with('?')) {
      param.optional = true;
      param.name.pop_back();
    }
    constexpr std::string_view kKinds[] = {"float", "int", "bool", "any", "number"};
    CHECK(!param.name.empty(), "signature '", text, "'");
    CHECK(std::find(std::begin(kKinds), std::end(kKinds), param.kind) != std::end(kKinds), "kind in '", text,
          "'");
    CHECK(with_kinds || colon == std::string::npos, "outputs have no kinds: '", text, "'");
    out.push_back(std::move(param));
    start = end + 1;
  }
  return out;
}

}  // namespace

Signature parse_signature(const std::string& text) {
  const std::size_t close = text.find(") -> ");
  CHECK(text.size() > 2 && text[0] == '(' && close != std::string::npos, "signature '", text, "'");
  return {parse_params(std::string_view(text).substr(1, close - 1), true),
          parse_params(std::string_view(text).substr(close + 5), false)};
}

void same_as_first_input(Inference& i) { i.y(i.x(0)); }

void broadcast_inputs(Inference& i) {
  TensorType out = i.x(0);
  for (std::size_t k = 1; k < i.count(); ++k) {
    i.require(i.x(k).dtype == out.dtype, "the element types differ");
    try {
      out.shape = broadcast(out.shape, i.shape(k));
    } catch (const Error& error) {
      i.fail(error.what());
    }
  }
  i.y(out);
}

}  // namespace onnxddp

#include "graph/builder.h"

#include <algorithm>
#include <mutex>

#include "graph/attributes.h"
#include "graph/registry.h"

namespace onnxddp {

const Signature& signature_of(const OpDef& op) {
  static std::mutex mutex;
  static std::map<const OpDef*, Signature> cache;
  const std::lock_guard lock(mutex);
  const auto at = cache.find(&op);
  return at != cache.end() ? at->second : cache.emplace(&op, parse_signature(op.signature)).first->second;
}

namespace {

bool kind_fits(const std::string& kind, DType dtype) {
  if (kind == "float") return is_float(dtype);
  if (kind == "int") return is_integer(dtype);
  if (kind == "bool") return dtype == DType::boolean;
  if (kind == "number") return dtype != DType::boolean;
  return true;
}

void check_inputs(const Graph& graph, const OpDef& op, const std::vector<ValueId>& inputs) {
  const Signature& signature = signature_of(op);
  const std::vector<Param>& params = signature.inputs;
  const bool variadic = !params.empty() && params.back().variadic;
  if (inputs.size() > params.size() && !variadic)
    throw Error(cat(op.name, " takes at most ", params.size(), " inputs, ", inputs.size(), " given"));
  for (std::size_t i = 0; i < std::max(inputs.size(), params.size()); ++i) {
    const Param& param = params[std::min(i, params.size() - 1)];
    if (i >= inputs.size() || !inputs[i]) {
      if (!param.optional && !(param.variadic && i > 0))
        throw Error(cat(op.name, ": input '", param.name, "' is missing"));
      continue;
    }
    const Value& value = graph.value(inputs[i]);
    if (!kind_fits(param.kind, value.type.dtype))
      throw Error(cat(op.name, ": input '", param.name, "' must be ", param.kind, ", but '", value.name,
                      "' is ", value.type));
  }
}

/// The attribute converted to the declared type (an integer for a float, integers for dimensions …).
Attr coerce(const OpDef& op, const AttrSpec& spec, Attr value) {
  if (auto* dims = std::get_if<Dims>(&value)) value = make_attr(*dims);
  const Attr& wanted = spec.default_value;
  if (std::holds_alternative<double>(wanted) && std::holds_alternative<std::int64_t>(value))
    return static_cast<double>(std::get<std::int64_t>(value));
  if (std::holds_alternative<std::vector<double>>(wanted) && std::holds_alternative<Ints>(value)) {
    const Ints& ints = std::get<Ints>(value);
    return std::vector<double>(ints.begin(), ints.end());
  }
  if (std::holds_alternative<Dims>(wanted) && std::holds_alternative<Ints>(value)) return value;
  if (std::holds_alternative<Ints>(wanted) && std::holds_alternative<Dims>(value)) return value;
  if (wanted.index() != value.index())
    throw Error(cat(op.name, ": attribute '", spec.name, "' has the wrong type"));
  return value;
}

}  // namespace

Attrs check_call(const Graph& graph, const OpDef& op, const std::vector<ValueId>& inputs, Attrs attrs) {
  check_inputs(graph, op, inputs);
  Attrs out;
  for (const AttrSpec& spec : op.attrs) {
    const auto at = attrs.find(spec.name);
    if (at == attrs.end()) {
      if (spec.required) throw Error(cat(op.name, ": attribute '", spec.name, "' is missing"));
      continue;
    }
    Attr value = coerce(op, spec, std::move(at->second));
    attrs.erase(at);
    if (spec.required || value != spec.default_value) out.emplace(spec.name, std::move(value));
  }
  if (!attrs.empty()) throw Error(cat(op.name, " has no attribute '", attrs.begin()->first, "'"));
  return out;
}

std::vector<TensorType> infer_types(const Graph& graph, const OpDef& op, const std::vector<ValueId>& inputs,
                                    const Attrs& attrs, std::optional<Dims>* ints) {
  Inference inference(graph, op, inputs, attrs);
  op.infer(inference);
  for (const TensorType& type : inference.outputs)
    for (const Dim& dim : type.shape)
      if (dim.is_constant() && dim.value() < 0)
        throw Error(cat(op.name, ": the result would have a negative dimension: ", type.str()));
  if (ints != nullptr && op.fold_dims) *ints = op.fold_dims(inference);
  return std::move(inference.outputs);
}

Builder::Builder(Graph& graph) : Builder(graph, graph.order) {}
Builder::Builder(Graph& graph, std::vector<NodeId>& order) : Builder(graph, order, default_registry()) {}
Builder::Builder(Graph& graph, std::vector<NodeId>& order, const Registry& registry)
    : graph_(graph), order_(order), registry_(registry) {}

std::vector<ValueId> Builder::emit(std::string_view op_name, std::vector<ValueId> inputs, Attrs attrs,
                                   std::vector<std::string> names, std::size_t outputs) {
  const OpDef& op = registry_.get(op_name);
  try {
    attrs = check_call(graph_, op, inputs, std::move(attrs));
    std::optional<Dims> ints;
    const std::vector<TensorType> types = infer_types(graph_, op, inputs, attrs, &ints);
    if (outputs == 0) {
      for (const Param& param : signature_of(op).outputs) {
        if (param.variadic) outputs = types.size();
        if (!param.optional && !param.variadic) ++outputs;
      }
    }
    outputs = std::min(outputs, types.size());
    const NodeId node = graph_.add_node(op, std::move(inputs), std::move(attrs), origin_);
    for (std::size_t i = 0; i < outputs; ++i) {
      const bool named = i < names.size() && !names[i].empty();
      graph_.add_result(node, named ? names[i] : hint_, types[i]);
    }
    if (ints) graph_.value(graph_.node(node).outputs[0]).ints = std::move(ints);
    order_.push_back(node);
    return graph_.node(node).outputs;
  } catch (Error& error) {
    if (!origin_.empty()) error.add_in(origin_);
    throw;
  }
}

Expr Builder::call(std::string_view op, const std::vector<Expr>& inputs, Attrs attrs,
                   const std::string& name) {
  std::vector<ValueId> ids;
  ids.reserve(inputs.size());
  for (const Expr& input : inputs) ids.push_back(input.id());
  return expr(emit(op, std::move(ids), std::move(attrs), {name})[0]);
}

Expr Builder::scalar(DType dtype, double value) {
  const HostTensor data = HostTensor::full(dtype, {}, value);
  std::string name = cat("c.", number_str(value));
  if (dtype != DType::f32) name += cat(".", dtype_name(dtype));
  const ValueId known = graph_.find(name);
  if (known && graph_.value(known).data && *graph_.value(known).data == data) return expr(known);
  return expr(graph_.add_constant(name, data));
}

Expr Builder::constant(const HostTensor& data, const std::string& name) {
  return expr(graph_.add_constant(name.empty() ? hint_ : name, data));
}

Expr Builder::dim_scalar(DType dtype, const Dim& value) {
  if (value.is_constant()) return scalar(dtype, static_cast<double>(value.value()));
  const std::string name = cat("c.", value.str(), dtype == DType::f32 ? "" : cat(".", dtype_name(dtype)));
  const ValueId known = graph_.find(name);
  if (known && graph_.value(known).kind == Kind::constant && graph_.value(known).ints == Dims{value})
    return expr(known);
  return expr(graph_.add_constant(name, TensorType{dtype, {}}, Dims{value}));
}

Builder& Expr::builder() const {
  CHECK(builder_ != nullptr, "empty expression");
  return *builder_;
}
const TensorType& Expr::type() const { return builder().graph().value(id_).type; }

namespace {
Expr number(Expr like, double value) { return like.builder().scalar(like.dtype(), value); }
}  // namespace

Expr call(std::string_view op, std::vector<Expr> inputs, Attrs attrs) {
  CHECK(!inputs.empty() && inputs[0], "call of ", op, " without a first input");
  return inputs[0].builder().call(op, inputs, std::move(attrs));
}
Expr operator+(Expr a, Expr b) { return call("Add", {a, b}); }
Expr operator-(Expr a, Expr b) { return call("Sub", {a, b}); }
Expr operator*(Expr a, Expr b) { return call("Mul", {a, b}); }
Expr operator/(Expr a, Expr b) { return call("Div", {a, b}); }
Expr operator-(Expr a) { return call("Neg", {a}); }
Expr operator+(Expr a, double b) { return a + number(a, b); }
Expr operator-(Expr a, double b) { return a - number(a, b); }
Expr operator*(Expr a, double b) { return a * number(a, b); }
Expr operator/(Expr a, double b) { return a / number(a, b); }
Expr operator+(double a, Expr b) { return number(b, a) + b; }
Expr operator-(double a, Expr b) { return number(b, a) - b; }
Expr operator*(double a, Expr b) { return number(b, a) * b; }
Expr operator/(double a, Expr b) { return number(b, a) / b; }

Expr exp(Expr x) { return call("Exp", {x}); }
Expr log(Expr x) { return call("Log", {x}); }
Expr sqrt(Expr x) { return call("Sqrt", {x}); }
Expr reciprocal(Expr x) { return call("Reciprocal", {x}); }
Expr reshape(Expr x, const Shape& shape) {
  return x.shape() == shape ? x : call("Reshape", {x}, {{"shape", make_attr(shape)}});
}
Expr transpose(Expr x, const Ints& perm) { return call("Transpose", {x}, {{"perm", perm}}); }
Expr expand(Expr x, const Shape& shape) {
  return x.shape() == shape ? x : call("Expand", {x}, {{"shape", make_attr(shape)}});
}
Expr cast(Expr x, DType dtype) {
  return x.dtype() == dtype ? x : call("Cast", {x}, {{"to", std::string(dtype_name(dtype))}});
}
Expr sum_to(Expr x, const Shape& shape) {
  return x.shape() == shape ? x : call("SumTo", {x}, {{"shape", make_attr(shape)}});
}

namespace {
Expr reduce(std::string_view op, Expr x, Ints axes, bool keepdims) {
  if (axes.empty())
    for (std::size_t i = 0; i < x.rank(); ++i) axes.push_back(static_cast<std::int64_t>(i));
  for (std::int64_t& axis : axes) axis = normal_axis(axis, x.rank());
  std::sort(axes.begin(), axes.end());
  return call(op, {x}, {{"axes", axes}, {"keepdims", std::int64_t{keepdims ? 1 : 0}}});
}
}  // namespace

Expr reduce_sum(Expr x, Ints axes, bool keepdims) {
  return reduce("ReduceSum", x, std::move(axes), keepdims);
}
Expr reduce_mean(Expr x, Ints axes, bool keepdims) {
  return reduce("ReduceMean", x, std::move(axes), keepdims);
}
Expr matmul(Expr a, Expr b) { return call("MatMul", {a, b}); }
Expr gemm(Expr a, Expr b, bool trans_a, bool trans_b) {
  return call("Gemm", {a, b},
              {{"transA", std::int64_t{trans_a ? 1 : 0}}, {"transB", std::int64_t{trans_b ? 1 : 0}}});
}

}  // namespace onnxddp

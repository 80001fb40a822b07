// The IR as ONNX: standard operators where their canonical form has one, the domain "onnxddp" for the rest.
#include <cmath>
#include <limits>

#include "graph/op.h"
#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

constexpr int kOpset = 20;
constexpr int kIr = 9;

/// Ops whose canonical inputs and attributes are ONNX's.
const std::set<std::string, std::less<>> kSame = {
    "Neg",        "Exp",        "Log",         "Sqrt",
    "Reciprocal", "Sigmoid",    "Tanh",        "Relu",
    "Abs",        "Sign",       "Identity",    "Erf",
    "Add",        "Sub",        "Mul",         "Div",
    "Pow",        "Max",        "Min",         "Equal",
    "Less",       "Greater",    "And",         "Or",
    "Not",        "Where",      "MatMul",      "Gemm",
    "Conv",       "MaxPool",    "AveragePool", "GlobalAveragePool",
    "Softmax",    "LogSoftmax", "Transpose",   "Concat",
    "Gather",     "Flatten",    "ArgMax"};

class Exporter {
 public:
  Exporter(const Graph& graph, const std::map<std::string, HostTensor>& values)
      : graph_(graph), values_(values) {}

  std::string run() {
    model_.set_ir_version(kIr);
    model_.set_producer_name("onnx-ddp");
    opset("", kOpset);
    out_ = model_.mutable_graph();
    out_->set_name(graph_.name.empty() ? "g" : graph_.name);
    for (ValueId id : graph_.inputs) *out_->add_input() = info(id);
    for (ValueId id : graph_.params) param(id);
    for (ValueId id : graph_.constants) constant(id);
    for (NodeId id : graph_.order) node(graph_.node(id));
    for (const Output& output : graph_.outputs) add_output(output.name, output.value);
    for (const Update& update : graph_.updates) {
      metadata("onnx_ddp.update." + name(update.param), name(update.next));
      bool listed = false;
      for (const pb::ValueInfoProto& known : out_->output()) listed |= known.name() == name(update.next);
      if (!listed) *out_->add_output() = info(update.next);
    }
    if (own_) opset(kOwnDomain, 1);
    return serialize(model_);
  }

 private:
  const std::string& name(ValueId id) const { return graph_.value(id).name; }

  void opset(const std::string& domain, int version) {
    pb::OperatorSetIdProto* import = model_.add_opset_import();
    import->set_domain(domain);
    import->set_version(version);
  }

  void metadata(const std::string& key, const std::string& value) {
    pb::StringStringEntryProto* entry = model_.add_metadata_props();
    entry->set_key(key);
    entry->set_value(value);
  }

  pb::ValueInfoProto info(ValueId id) const {
    pb::ValueInfoProto out;
    out.set_name(name(id));
    const TensorType& type = graph_.value(id).type;
    out.mutable_type()->mutable_tensor_type()->set_elem_type(proto_dtype(type.dtype));
    auto* shape = out.mutable_type()->mutable_tensor_type()->mutable_shape();
    for (const Dim& dim : type.shape) {
      if (dim.is_constant())
        shape->add_dim()->set_dim_value(dim.value());
      else
        shape->add_dim()->set_dim_param(dim.str());
    }
    return out;
  }

  void param(ValueId id) {
    const auto found = values_.find(name(id));
    if (found == values_.end()) {
      *out_->add_input() = info(id);
      return;
    }
    initializer(name(id), found->second);
  }

  void initializer(const std::string& tensor_name, const HostTensor& value) {
    pb::TensorProto* tensor = out_->add_initializer();
    tensor->set_name(tensor_name);
    set_tensor(*tensor, value);
  }

  void constant(ValueId id) {
    const Value& value = graph_.value(id);
    if (value.data) return initializer(value.name, *value.data);
    pb::NodeProto* made = own_node("Dims");  // contents that depend on the batch
    strings(*made, "contents", *value.ints);
    made->add_output(value.name);
  }

  void add_output(const std::string& output, ValueId value) {
    if (output != name(value)) {
      pb::NodeProto* identity = out_->add_node();
      identity->set_op_type("Identity");
      identity->add_input(name(value));
      identity->add_output(output);
    }
    *out_->add_output() = info(value);
    out_->mutable_output()->rbegin()->set_name(output);
  }

  // ---- nodes

  pb::NodeProto* own_node(const std::string& op) {
    own_ = true;
    pb::NodeProto* made = out_->add_node();
    made->set_op_type(op);
    made->set_domain(kOwnDomain);
    return made;
  }

  static pb::AttributeProto* attribute(pb::NodeProto& node, const std::string& key,
                                       pb::AttributeProto::AttributeType type) {
    pb::AttributeProto* out = node.add_attribute();
    out->set_name(key);
    out->set_type(type);
    return out;
  }

  static void strings(pb::NodeProto& node, const std::string& key, const Dims& dims) {
    pb::AttributeProto* out = attribute(node, key, pb::AttributeProto::STRINGS);
    for (const Dim& dim : dims) out->add_strings(dim.str());
  }

  static void set_attribute(pb::NodeProto& node, const std::string& key, const Attr& value) {
    using A = pb::AttributeProto;
    if (const auto* i = std::get_if<std::int64_t>(&value)) attribute(node, key, A::INT)->set_i(*i);
    if (const auto* d = std::get_if<double>(&value))
      attribute(node, key, A::FLOAT)->set_f(static_cast<float>(*d));
    if (const auto* s = std::get_if<std::string>(&value)) attribute(node, key, A::STRING)->set_s(*s);
    if (const auto* dims = std::get_if<Dims>(&value)) strings(node, key, *dims);
    if (const auto* ints = std::get_if<Ints>(&value)) {
      A* out = attribute(node, key, A::INTS);
      for (std::int64_t i : *ints) out->add_ints(i);
    }
    if (const auto* numbers = std::get_if<std::vector<double>>(&value)) {
      A* out = attribute(node, key, A::FLOATS);
      for (double d : *numbers) out->add_floats(static_cast<float>(d));
    }
  }

  void node(const Node& node) {
    const int before = out_->node_size();
    if (!standard(node)) own(node);
    pb::NodeProto& made = *out_->mutable_node(out_->node_size() - 1);
    CHECK(out_->node_size() > before, "no node for ", node.op->name);
    for (ValueId output : node.outputs) {
      made.add_output(name(output));
      *out_->add_value_info() = info(output);
    }
    if (!node.outputs.empty()) made.set_name(name(node.outputs[0]));
  }

  void own(const Node& node) {
    pb::NodeProto* made = own_node(node.op->name);
    for (ValueId input : node.inputs) made->add_input(input ? name(input) : "");
    for (const auto& [key, value] : node.attrs) set_attribute(*made, key, value);
  }

  static const Attr& attr(const Node& node, const std::string& key) {
    const auto found = node.attrs.find(key);
    if (found != node.attrs.end()) return found->second;
    for (const AttrSpec& spec : node.op->attrs)
      if (spec.name == key) return spec.default_value;
    throw InternalError(cat(node.op->name, " has no attribute ", key));
  }

  static Ints ints(const Node& node, const std::string& key) {
    return static_shape(attr_dims(attr(node, key)));
  }

  static bool has_symbols(const Node& node) {
    for (const auto& [key, value] : node.attrs)
      if (std::holds_alternative<Dims>(value)) return true;
    return false;
  }

  pb::NodeProto* begin(const Node& node) {
    pb::NodeProto* made = out_->add_node();
    made->set_op_type(node.op->name);
    for (ValueId input : node.inputs) made->add_input(input ? name(input) : "");
    return made;
  }

  /// Adds a constant input to a node whose first inputs are given; `suffix` tells the inputs of one node
  /// apart.
  std::string operand(const Node& node, const std::string& suffix, const HostTensor& value) {
    const std::string tensor = graph_.unique_name(cat(name(node.outputs.at(0)), ".", suffix));
    initializer(tensor, value);
    return tensor;
  }
  std::string operand(const Node& node, const std::string& suffix, const Ints& value) {
    return operand(node, suffix,
                   HostTensor::of<std::int64_t>({static_cast<std::int64_t>(value.size())}, value));
  }

  /// True if the node was written with a standard operator.
  bool standard(const Node& node) {
    const std::string& op = node.op->name;
    if (op == "Reshape") return reshape(node);
    if (has_symbols(node)) return false;
    if (kSame.count(op)) {
      pb::NodeProto* made = begin(node);
      for (const AttrSpec& spec : node.op->attrs) set_attribute(*made, spec.name, attr(node, spec.name));
      return true;
    }
    if (op == "Expand") return begin(node)->add_input(operand(node, "shape", ints(node, "shape"))), true;
    if (op == "Squeeze" || op == "Unsqueeze")
      return begin(node)->add_input(operand(node, "axes", ints(node, "axes"))), true;
    if (op == "ReduceSum" || op == "ReduceMean" || op == "ReduceMax" || op == "ReduceProd")
      return reduce(node);
    if (op == "Slice") return slice(node);
    if (op == "Clip") return clip(node);
    if (op == "Cast") return cast(node);
    if (op == "BatchNormalization") return batch_norm(node);
    return false;
  }

  bool reshape(const Node& node) {
    const Dims shape = attr_dims(attr(node, "shape"));
    Ints to;
    int symbolic = 0;
    for (const Dim& dim : shape) {
      symbolic += !dim.is_constant();
      to.push_back(dim.is_constant() ? dim.value() : -1);
    }
    bool empty = false;
    for (std::int64_t d : to) empty |= d == 0;
    if (symbolic > 1 || empty) return false;
    begin(node)->add_input(operand(node, "shape", to));
    return true;
  }

  bool reduce(const Node& node) {
    const Ints axes = ints(node, "axes");
    if (axes.empty()) return false;  // of a scalar
    pb::NodeProto* made = begin(node);
    set_attribute(*made, "keepdims", attr(node, "keepdims"));
    made->add_input(operand(node, "axes", axes));
    return true;
  }

  bool slice(const Node& node) {
    Ints ends = ints(node, "ends");
    const Ints steps = ints(node, "steps");
    for (std::size_t i = 0; i < ends.size(); ++i)
      if (steps[i] < 0 && ends[i] < 0)
        ends[i] = std::numeric_limits<std::int64_t>::min();  // -1 would be the last element
    pb::NodeProto* made = begin(node);
    made->add_input(operand(node, "starts", ints(node, "starts")));
    made->add_input(operand(node, "ends", ends));
    made->add_input(operand(node, "axes", ints(node, "axes")));
    made->add_input(operand(node, "steps", steps));
    return true;
  }

  bool clip(const Node& node) {
    const DType dtype = graph_.value(node.inputs.at(0)).type.dtype;
    pb::NodeProto* made = begin(node);
    for (const char* key : {"min", "max"}) {
      const double bound = std::get<double>(attr(node, key));
      made->add_input(std::isinf(bound) ? "" : operand(node, key, HostTensor::full(dtype, {}, bound)));
    }
    return true;
  }

  bool cast(const Node& node) {
    set_attribute(
        *begin(node), "to",
        static_cast<std::int64_t>(proto_dtype(*dtype_from_name(std::get<std::string>(attr(node, "to"))))));
    return true;
  }

  /// ONNX's training form knows the population variance only and no second reader of the statistics.
  bool batch_norm(const Node& node) {
    if (std::get<std::int64_t>(attr(node, "training")) != 0 || node.outputs.size() > 1) return false;
    pb::NodeProto* made = begin(node);
    set_attribute(*made, "epsilon", attr(node, "epsilon"));
    set_attribute(*made, "momentum", attr(node, "momentum"));
    return true;
  }

  const Graph& graph_;
  const std::map<std::string, HostTensor>& values_;
  pb::ModelProto model_;
  pb::GraphProto* out_ = nullptr;
  bool own_ = false;
};

}  // namespace

std::string graph_to_onnx(const Graph& graph, const std::map<std::string, HostTensor>& values) {
  return Exporter(graph, values).run();
}

}  // namespace onnxddp

// Model -> Graph: values with roles, nodes through the op entries, symbolic batch.
#include <onnx/defs/schema.h>

#include <algorithm>

#include "graph/builder.h"
#include "graph/pass.h"
#include "graph/registry.h"
#include "importer/onnx/batch.h"
#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

class Importer {
 public:
  Importer(std::shared_ptr<const OnnxModel> model, const ImportOptions& options, const Flat& flat,
           const std::vector<TensorRole>& roles, const BatchChange& change)
      : options_(options),
        flat_(flat),
        change_(change),
        names_(flat.names),
        proto_(model->proto),
        builder_(out_.graph) {
    out_.source = std::move(model);
    out_.roles = roles;
    out_.batch_symbol = change.symbol.empty() ? "N" : change.symbol;
    if (!change.symbol.empty()) symbols_.insert(change.symbol);
    for (const pb::StringStringEntryProto& entry : proto_.metadata_props())
      out_.metadata[entry.key()] = entry.value();
    if (!proto_.graph().name().empty()) out_.graph.name = proto_.graph().name();
  }

  ImportedModel run() {
    inputs();
    tensors();
    for (const FlatNode& node : flat_.nodes) import_node(node, 0);
    outputs();
    check_options();
    state_values();
    return std::move(out_);
  }

 private:
  // ---- inputs

  void inputs() {
    for (const pb::ValueInfoProto& info : proto_.graph().input()) {
      if (flat_.tensor_index.count(info.name())) continue;  // older files list initializers as inputs
      try {
        input(info);
      } catch (Error& e) {
        e.add_in(cat(out_.source->file, ", input '", info.name(), "'"));
        throw;
      }
    }
  }

  void input(const pb::ValueInfoProto& info) {
    if (!info.type().has_tensor_type()) throw Error("the input is not a tensor, which is not supported");
    const auto& proto = info.type().tensor_type();
    const auto dtype = dtype_of_proto(proto.elem_type());
    if (!dtype) throw Error(cat("element type ", proto_dtype_name(proto.elem_type()), " is not supported"));
    if (!proto.has_shape())
      throw Error("the input's rank is not given").hint("export the model with known ranks");
    TensorType type{*dtype, {}};
    for (int i = 0; i < proto.shape().dim_size(); ++i)
      type.shape.push_back(dimension(info.name(), proto.shape().dim(i), i));
    if (!type.shape.empty() && change_.symbol.empty() && !seen_batch_ && !type.shape[0].is_constant()) {
      const std::set<std::string> symbols = type.shape[0].symbols();
      if (symbols.size() == 1) out_.batch_symbol = *symbols.begin(), seen_batch_ = true;
    }
    out_.roles.push_back({info.name(), type, Role::input, "fed from data"});
    const auto fixed = options_.inputs.find(info.name());
    if (fixed == options_.inputs.end()) {
      values_[info.name()] = out_.graph.add_input(info.name(), type);
      return;
    }
    used_inputs_.insert(info.name());
    out_.roles.back().reason = cat("--input ", info.name(), "=", fixed->second);
    const Expr value = builder_.constant(HostTensor::full(*dtype, {}, number_of(info.name(), fixed->second)),
                                         type.shape.empty() ? info.name() : info.name() + ".value");
    values_[info.name()] =
        type.shape.empty()
            ? value.id()
            : builder_.call("Expand", {value}, {{"shape", make_attr(type.shape)}}, info.name()).id();
  }

  Dim dimension(const std::string& input, const pb::TensorShapeProto::Dimension& dim, int i) {
    if (dim.has_dim_value()) {
      if (dim.dim_value() < 0) throw Error(cat("dimension ", i, " is ", dim.dim_value()));
      if (i == 0 && change_.covers(dim.dim_value())) return Dim::symbol(change_.symbol);
      return dim.dim_value();
    }
    Dim symbol = dim.has_dim_param() && !dim.dim_param().empty() ? symbol_of(dim.dim_param())
                 : i == 0                                        ? Dim::symbol("N")
                                                                 : symbol_of(cat(input, "_", i));
    for (const std::string& name : symbol.symbols()) symbols_.insert(name);
    return symbol.bind(bindings());
  }

  /// The symbol of a changed batch is bound at the end: until then it tells what depends on the batch.
  DimBindings bindings() const { return {options_.dims.begin(), options_.dims.end()}; }

  void check_options() const {
    for (const auto& [name, value] : options_.inputs)
      if (!used_inputs_.count(name)) {
        std::string known;
        for (const TensorRole& role : out_.roles)
          if (role.role == Role::input) known += (known.empty() ? "" : ", ") + role.name;
        throw usage_error(cat("--input ", name, ": the model has no such input"))
            .hint(cat("its inputs are: ", known));
      }
    for (const auto& [name, value] : options_.dims)
      if (!symbols_.count(name)) {
        std::string known;
        for (const std::string& symbol : symbols_) known += (known.empty() ? "" : ", ") + symbol;
        throw usage_error(cat("--dim ", name, ": the model has no such dimension"))
            .hint(known.empty() ? "all its dimensions are numbers"
                                : cat("its symbolic dimensions are: ", known));
      }
  }

  // ---- tensors

  void tensors() {
    for (std::size_t i = 0; i < flat_.tensors.size(); ++i) {
      const FileTensor& tensor = flat_.tensors[i];
      const TensorRole& role = out_.roles[i];  // roles of inputs and outputs stand behind
      if (role.reason == "no path to an output" && !is_output(tensor.name)) continue;
      try {
        values_[tensor.name] = add_tensor(tensor, role);
      } catch (Error& e) {
        e.add_in(out_.source->file);
        throw;
      }
    }
  }

  bool is_output(const std::string& name) const {
    const auto& list = proto_.graph().output();
    return std::any_of(list.begin(), list.end(),
                       [&](const pb::ValueInfoProto& info) { return info.name() == name; });
  }

  ValueId add_tensor(const FileTensor& tensor, const TensorRole& role) {
    if (!tensor.type())
      throw Error(cat("tensor '", tensor.name, "' has an element type that is not supported"));
    HostTensor value = tensor.value();
    Kind kind = Kind::constant;
    if (role.role == Role::parameter) kind = Kind::param;
    if (role.role == Role::buffer || role.role == Role::frozen) kind = Kind::state;
    if (kind == Kind::constant && is_float(value.dtype()) && value.numel() > kConstantLimit)
      kind = Kind::state;
    if (kind == Kind::constant) return out_.graph.add_constant(tensor.name, std::move(value));
    const ValueId id = out_.graph.add_param(tensor.name, value.type(), kind);
    out_.values.emplace(tensor.name, std::move(value));
    return id;
  }

  // ---- nodes

  ValueId lookup(const std::string& name) const {
    if (name.empty()) return kNone;
    const auto found = values_.find(name);
    if (found == values_.end()) throw Error(cat("tensor '", name, "' is not known"));
    return found->second;
  }

  void import_node(const FlatNode& node, int depth) {
    builder_.set_origin(node.origin);
    builder_.set_hint(first_output(node));
    try {
      if (depth > 16) throw Error(cat(node.op(), ": function bodies are nested too deep"));
      if (node.is("Constant")) return constant(node);
      const OpDef* op = node.domain() == kOwnDomain ? builder_.registry().find(node.op())
                                                    : builder_.registry().find_onnx(node.domain(), node.op());
      if (op) return through_entry(node, *op);
      expand(node, depth);
    } catch (Error& e) {
      std::string place = cat(out_.source->file, ", ", node.origin);
      if (e.place().rfind(out_.source->file, 0) != 0) throw relocated(e, place);
      throw;
    }
  }

  /// The error with the file in front of the node that the builder named.
  static Error relocated(const Error& e, const std::string& place) { return Error(e).in(place); }

  static std::string first_output(const FlatNode& node) {
    for (std::size_t i = 0; i < node.outputs.size(); ++i)
      if (!node.outputs[i].empty()) return node.outputs[i];
    return node.op();
  }

  /// A Constant whose value depends on the call of a function, or in a body of ONNX's.
  void constant(const FlatNode& node) {
    FileTensor tensor;
    tensor.name = node.outputs.at(0);
    tensor.constant = node.proto.get();
    const pb::AttributeProto* value = find_attribute(*node.proto, "value");
    if (value && value->has_t()) tensor.tensor = &value->t();
    values_[tensor.name] = out_.graph.add_constant(out_.graph.unique_name(tensor.name), tensor.value());
  }

  void expand(const FlatNode& node, int depth) {
    std::vector<pb::TypeProto> types;
    for (const std::string& input : node.inputs)
      types.push_back(input.empty() ? pb::TypeProto() : type_proto(out_.graph.value(lookup(input)).type));
    const std::shared_ptr<const pb::FunctionProto> body = onnx_body(node, types);
    if (!body)
      throw Error(cat("operator ", node.domain().empty() ? "ai.onnx" : node.domain(), "::", node.op(),
                      " is not supported"));
    bodies_.push_back(body);
    for (const FlatNode& inner : inline_function(*body, node, names_)) import_node(inner, depth + 1);
  }

  void through_entry(const FlatNode& flat, const OpDef& op) {
    OnnxNode node(builder_);
    node.op_type = flat.op();
    node.domain = flat.domain();
    node.name = flat.proto->name();
    node.opset = flat.opset();
    for (const std::string& input : flat.inputs) node.inputs.push_back(lookup(input));
    node.output_count = flat.outputs.size();
    node.output_used = flat.used;
    node.batch_norm_train = batch_norm_trains(flat);
    node.batch_norm_unbiased = options_.bn_unbiased;
    node.training = options_.training;
    for (const pb::AttributeProto& attribute : flat.proto->attribute()) {
      if (attribute.type() == pb::AttributeProto::TENSOR)
        node.tensors.emplace(attribute.name(),
                             to_host(attribute.t(), cat("attribute '", attribute.name(), "'")));
      else
        node.attrs.emplace(attribute.name(), to_attr(attribute, flat.domain()));
    }
    if (!change_.symbol.empty()) change_.apply(node, out_.graph);
    const std::size_t before = out_.graph.value_count();
    const std::size_t length = out_.graph.order.size();
    if (flat.domain() == kOwnDomain || !op.onnx.import)
      copy(node, op);
    else
      op.onnx.import(node);
    fold_number(flat, node, length);
    take_results(flat, node, before);
    take_updates(node);
  }

  /// Attributes and inputs as they are.
  void copy(OnnxNode& node, const OpDef& op) {
    std::vector<std::string> names;
    const std::vector<ValueId> results =
        builder_.emit(op.name, node.inputs, node.attrs, names, node.output_count);
    for (std::size_t i = 0; i < results.size(); ++i) node.y(i, builder_.expr(results[i]));
  }

  bool batch_norm_trains(const FlatNode& node) const {
    if (!options_.training || options_.bn == "eval") return false;
    if (options_.bn == "train") return true;
    if (options_.bn != "as-file")
      throw usage_error(cat("--bn ", options_.bn, ": must be train, eval or as-file"));
    if (node.opset() >= 14) {
      const pb::AttributeProto* mode = find_attribute(*node.proto, "training_mode");
      return mode && mode->i() != 0;
    }
    return std::count_if(node.outputs.begin(), node.outputs.end(),
                         [](const std::string& name) { return !name.empty(); }) > 1;
  }

  /// Numbers stay known through casts and views, so that bounds and exponents can be read.
  void fold_number(const FlatNode& flat, OnnxNode& node, std::size_t length) {
    static const std::set<std::string> kOps = {"Identity", "Cast",      "CastLike", "Reshape",
                                               "Squeeze",  "Unsqueeze", "Flatten"};
    Graph& graph = out_.graph;
    if (!flat.domain().empty() || !kOps.count(flat.op()) || node.results.empty() || !node.results[0]) return;
    const Value& x = graph.value(node.inputs[0]);
    const TensorType type = graph.value(node.results[0]).type;
    if (x.kind != Kind::constant || !x.data || x.data->numel() != 1 || !is_static(type.shape)) return;
    const HostTensor value = x.data->cast(type.dtype).reshaped(static_shape(type.shape));
    graph.order.resize(length);
    node.results[0] = graph.add_constant(graph.unique_name(flat.outputs[0] + ".value"), value);
  }

  /// Gives the results the file's names.
  void take_results(const FlatNode& flat, const OnnxNode& node, std::size_t before) {
    for (std::size_t i = 0; i < flat.outputs.size(); ++i) {
      if (!flat.used[i]) continue;
      if (i >= node.results.size() || !node.results[i])
        throw Error(cat(node.op_type, ": output ", i, " ('", flat.outputs[i], "') is not supported"))
            .hint("nothing should read it when training");
      values_[flat.outputs[i]] = named(node.results[i], flat.outputs[i], before);
    }
  }

  ValueId named(ValueId id, const std::string& name, std::size_t before) {
    Graph& graph = out_.graph;
    if (graph.value(id).name == name) return claimed_.insert(id), id;
    const bool fresh = static_cast<std::size_t>(id.index) >= before && !claimed_.count(id);
    const bool shared = graph.value(id).kind == Kind::constant && graph.value(id).name.rfind("c.", 0) == 0;
    const ValueId holder = graph.find(name);  // an intermediate that took its name from the hint
    if (holder && holder != id) graph.rename(holder, graph.unique_name(name + ".t"));
    if (fresh && !shared) {
      graph.rename(id, name);
      claimed_.insert(id);
      return id;
    }
    return builder_.call("Identity", {builder_.expr(id)}, {}, name).id();
  }

  /// The same batch norm applied twice updates its statistics twice, in order.
  void take_updates(const OnnxNode& node) {
    Graph& graph = out_.graph;
    for (const Update& update : node.updates) {
      if (graph.value(update.param).kind != Kind::state)
        continue;  // statistics that are computed cannot be kept
      const ValueId earlier = graph.update_of(update.param);
      if (!earlier) {
        graph.updates.push_back(update);
        const std::string next = graph.value(update.param).name + ".next";
        if (!claimed_.count(update.next) && !names_.count(next) && !graph.find(next))
          graph.rename(update.next, next);
        continue;
      }
      const NodeId producer = graph.value(update.next).producer;
      if (producer)
        for (ValueId& input : graph.node(producer).inputs)
          if (input == update.param) input = earlier;
      for (Update& known : graph.updates)
        if (known.param == update.param) known.next = update.next;
    }
  }

  /// State that entries add, such as the generator of Dropout, begins at zero.
  void state_values() {
    for (ValueId id : out_.graph.params) {
      const Value& value = out_.graph.value(id);
      if (!out_.values.count(value.name))
        out_.values.emplace(value.name, HostTensor(value.type.dtype, static_shape(value.type.shape)));
    }
  }

  // ---- outputs

  void outputs() {
    for (const pb::ValueInfoProto& info : proto_.graph().output()) {
      const ValueId value = lookup(info.name());
      out_.graph.outputs.push_back({info.name(), value});
      out_.roles.push_back({info.name(), out_.graph.value(value).type, Role::output, "output of the graph"});
    }
  }

  const ImportOptions& options_;
  const Flat& flat_;
  const BatchChange& change_;
  std::set<std::string> names_;
  const pb::ModelProto& proto_;
  ImportedModel out_;
  Builder builder_;
  std::unordered_map<std::string, ValueId> values_;
  std::set<ValueId> claimed_;
  std::set<std::string> symbols_, used_inputs_;
  std::vector<std::shared_ptr<const pb::FunctionProto>> bodies_;
  bool seen_batch_ = false;
};

void bind_batch(ImportedModel& out, const std::string& symbol, const ImportOptions& options) {
  const auto given = options.dims.find(symbol);
  if (given == options.dims.end()) return;
  const DimBindings bindings{{symbol, given->second}};
  bind_dims(out.graph, bindings);
  for (TensorRole& role : out.roles) role.type.shape = bind_shape(role.type.shape, bindings);
}

void warn(ImportedModel& out) {
  const bool trains = std::any_of(out.roles.begin(), out.roles.end(),
                                  [](const TensorRole& role) { return role.role == Role::parameter; });
  if (!trains) out.warnings.push_back("no tensor of the model trains; `--train REGEX` names some");
  const int folded = folded_batch_norms(out.source->proto);
  if (folded > 0)
    out.warnings.push_back(cat(folded, folded == 1 ? " batch norm was" : " batch norms were",
                               " folded into convolutions by the exporter, which train as plain Conv; export "
                               "with optimize=False to keep them"));
}

}  // namespace

ImportedModel import_onnx(std::shared_ptr<const OnnxModel> model, const ImportOptions& options) {
  const Flat flat = flatten(model->proto);
  const std::vector<std::string> unknown = unknown_ops(flat);
  if (!unknown.empty()) {
    std::string list;
    for (const std::string& op : unknown) list += (list.empty() ? "" : ", ") + op;
    throw Error(cat(unknown.size(), unknown.size() == 1 ? " operator is" : " operators are",
                    " not supported: ", one_line(list, 1500)))
        .in(model->file)
        .hint("`onnx-ddp ops` lists those that are; functions with a body are inlined");
  }
  const std::vector<TensorRole> roles = assign_roles(flat, options);
  std::string why;
  for (const BatchChange& change : batch_changes(model->proto)) {
    try {
      ImportedModel out = Importer(model, options, flat, roles, change).run();
      if (!change.symbol.empty()) {
        change.verify(model->proto, out.graph);
        out.notes.push_back(cat("batch dimension ", change.old, " made symbolic (", change.symbol, ")"));
        bind_batch(out, change.symbol, options);
      } else if (!why.empty()) {
        out.notes.push_back(
            cat("the batch dimension stays fixed at ", fixed_batch(model->proto).value_or(0), ": ", why));
      }
      warn(out);
      return out;
    } catch (const Error& e) {
      if (change.symbol.empty() || e.exit_code() == kExitUsage) throw;
      if (why.empty()) why = one_line(e.what(), 200);
    }
  }
  throw InternalError("no import was tried");
}

}  // namespace onnxddp

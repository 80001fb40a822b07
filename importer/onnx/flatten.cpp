// Functions of the model and of ONNX, inlined; dead nodes dropped; which ops nobody knows.
#include <onnx/defs/schema.h>

#include <algorithm>

#include "graph/registry.h"
#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

using Names = std::set<std::string>;
using Nodes = google::protobuf::RepeatedPtrField<pb::NodeProto>;

std::string free_name(Names& names, const std::string& hint) {
  std::string name = hint;
  for (int k = 2; !names.insert(name).second; ++k) name = cat(hint, ".", k);
  return name;
}

std::string node_label(const pb::NodeProto& node) {
  return node.name().empty() ? "" : " '" + node.name() + "'";
}

/// Where names and attributes of a body mean something.
struct Scope {
  bool main = false;
  std::shared_ptr<const Opsets> opsets;
  std::unordered_map<std::string, std::string> names;
  std::unordered_map<std::string, const pb::AttributeProto*> attributes;
  std::string prefix, origin;
};

class Flattener {
 public:
  explicit Flattener(Names& names) : names_(names) {}

  void add_functions(const pb::ModelProto& model) {
    for (const pb::FunctionProto& function : model.functions())
      functions_[{plain_domain(function.domain()), function.name(), function.overload()}] = &function;
  }
  void add_tensors(const std::vector<FileTensor>& tensors) {
    for (const FileTensor& tensor : tensors)
      if (tensor.constant) constants_[tensor.constant] = tensor.name;
  }

  void graph(const pb::GraphProto& graph, std::shared_ptr<const Opsets> opsets) {
    Scope scope;
    scope.main = true;
    scope.opsets = std::move(opsets);
    walk(graph.node(), scope);
  }

  void body(const pb::FunctionProto& function, const FlatNode& call) {
    Scope scope;
    scope.opsets = function_opsets(function, *call.opsets);
    for (const pb::AttributeProto& attribute : function.attribute_proto())
      scope.attributes[attribute.name()] = &attribute;
    for (const pb::AttributeProto& attribute : call.proto->attribute())
      scope.attributes[attribute.name()] = &attribute;
    for (int i = 0; i < function.input_size(); ++i)
      scope.names[function.input(i)] =
          static_cast<std::size_t>(i) < call.inputs.size() ? call.inputs[static_cast<std::size_t>(i)] : "";
    std::vector<std::pair<std::string, std::string>> aliases;  // inner name -> output that is not its own
    for (int i = 0; i < function.output_size() && static_cast<std::size_t>(i) < call.outputs.size(); ++i) {
      const std::string& outer = call.outputs[static_cast<std::size_t>(i)];
      if (outer.empty()) continue;
      if (is_constant_of(function, function.output(i)) ||
          !scope.names.emplace(function.output(i), outer).second)
        aliases.emplace_back(function.output(i), outer);
    }
    const std::string first = call.outputs.empty() ? "" : call.outputs[0];
    scope.prefix = (call.proto->name().empty() ? first : call.proto->name()) + "/";
    scope.origin = call.origin + " > ";
    walk(function.node(), scope);
    for (const auto& [inner, outer] : aliases) identity(resolve(scope, inner), outer, scope, call.origin);
  }

  std::vector<FlatNode> nodes;

 private:
  bool is_constant_of(const pb::FunctionProto& function, const std::string& name) const {
    return std::any_of(function.node().begin(), function.node().end(), [&](const pb::NodeProto& node) {
      return node.output_size() == 1 && node.output(0) == name && constants_.count(&node);
    });
  }

  static std::shared_ptr<const Opsets> function_opsets(const pb::FunctionProto& function,
                                                       const Opsets& outer) {
    auto opsets = std::make_shared<Opsets>(opsets_of(function.opset_import()));
    opsets->insert(outer.begin(), outer.end());
    return opsets;
  }

  std::string resolve(Scope& scope, const std::string& name) {
    if (name.empty() || scope.main) return name;
    const auto found = scope.names.find(name);
    if (found != scope.names.end()) return found->second;
    return scope.names[name] = free_name(names_, scope.prefix + name);
  }

  void identity(const std::string& from, const std::string& to, const Scope& scope,
                const std::string& origin) {
    auto proto = std::make_shared<pb::NodeProto>();
    proto->set_op_type("Identity");
    nodes.push_back({std::move(proto), {from}, {to}, {true}, scope.opsets, origin});
  }

  std::shared_ptr<const pb::NodeProto> resolved(const pb::NodeProto& node, const Scope& scope) {
    const bool refers = std::any_of(node.attribute().begin(), node.attribute().end(),
                                    [](const pb::AttributeProto& a) { return !a.ref_attr_name().empty(); });
    if (!refers) return {std::shared_ptr<const void>(), &node};  // owned by the model
    auto copy = std::make_shared<pb::NodeProto>(node);
    copy->clear_attribute();
    for (const pb::AttributeProto& attribute : node.attribute()) {
      const pb::AttributeProto* value = &attribute;
      if (!attribute.ref_attr_name().empty()) {
        const auto found = scope.attributes.find(attribute.ref_attr_name());
        if (found == scope.attributes.end()) continue;  // not given at the call: the op's default holds
        value = found->second;
      }
      pb::AttributeProto* added = copy->add_attribute();
      *added = *value;
      added->set_name(attribute.name());
    }
    return copy;
  }

  void walk(const Nodes& list, Scope& scope) {
    int index = -1;
    for (const pb::NodeProto& node : list) {
      ++index;
      const auto constant = constants_.find(&node);
      if (constant != constants_.end()) {  // one value for all calls of the function
        if (!scope.main) scope.names[node.output(0)] = constant->second;
        continue;
      }
      FlatNode flat;
      flat.opsets = scope.opsets;
      flat.proto = resolved(node, scope);
      for (const std::string& input : node.input()) flat.inputs.push_back(resolve(scope, input));
      for (const std::string& output : node.output()) flat.outputs.push_back(resolve(scope, output));
      flat.used.assign(flat.outputs.size(), true);
      flat.origin = cat(scope.origin, "node ", index, node_label(node), ", ", node.op_type());
      const auto function = functions_.find({flat.domain(), node.op_type(), node.overload()});
      if (function != functions_.end()) {
        body(*function->second, flat);
        continue;
      }
      flat.origin += cat(", opset ", flat.opset());
      nodes.push_back(std::move(flat));
    }
  }

  struct Key {
    std::string domain, name, overload;
    auto operator<=>(const Key&) const = default;
  };
  Names& names_;
  std::map<Key, const pb::FunctionProto*> functions_;
  std::unordered_map<const pb::NodeProto*, std::string> constants_;
};

/// Keeps what `wanted` needs, and marks the outputs that are read.
std::vector<FlatNode> prune(std::vector<FlatNode> nodes, std::set<std::string> wanted) {
  std::vector<FlatNode> kept;
  for (std::size_t k = nodes.size(); k-- > 0;) {
    FlatNode& node = nodes[k];
    bool live = false;
    for (std::size_t i = 0; i < node.outputs.size(); ++i) {
      node.used[i] = !node.outputs[i].empty() && wanted.count(node.outputs[i]);
      live = live || node.used[i];
    }
    if (!live) continue;
    wanted.insert(node.inputs.begin(), node.inputs.end());
    kept.push_back(std::move(node));
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

const pb::OpSchema* schema_of(const FlatNode& node) {
  const int opset = node.opset();
  return opset > 0 ? pb::OpSchemaRegistry::Schema(node.op(), opset, node.domain()) : nullptr;
}

bool has_entry(const FlatNode& node) {
  if (node.domain() == kOwnDomain) return default_registry().find(node.op()) != nullptr;
  return node.is("Constant") || default_registry().find_onnx(node.domain(), node.op()) != nullptr;
}

/// ONNX's body that does not depend on types. A body may have been written for a later opset than the node's:
/// it says what the same version of the operator does, and brings its own opset.
const pb::FunctionProto* plain_body(const FlatNode& node) {
  const pb::OpSchema* schema = schema_of(node);
  if (!schema || !schema->HasFunction()) return nullptr;
  const auto ranges = pb::OpSchemaRegistry::DomainToVersionRange::Instance().Map();
  const auto range = ranges.find(node.domain());
  const int newest = range == ranges.end() ? node.opset() : range->second.second;
  for (int opset = node.opset(); opset <= newest; ++opset) {
    const pb::OpSchema* same = pb::OpSchemaRegistry::Schema(node.op(), opset, node.domain());
    if (!same || same->SinceVersion() != schema->SinceVersion()) break;
    if (const pb::FunctionProto* body = schema->GetFunction(opset)) return body;
  }
  return nullptr;
}

bool has_typed_body(const FlatNode& node) {
  const pb::OpSchema* schema = schema_of(node);
  return schema && schema->HasContextDependentFunction();
}

bool is_known(const FlatNode& node, int depth) {
  if (has_entry(node)) return true;
  if (has_typed_body(node)) return true;  // its ops show at import only
  const pb::FunctionProto* function = plain_body(node);
  if (!function || depth == 0) return false;
  Names names;
  const std::vector<FlatNode> nodes = inline_function(*function, node, names);
  return std::all_of(nodes.begin(), nodes.end(),
                     [&](const FlatNode& inner) { return is_known(inner, depth - 1); });
}

}  // namespace

int FlatNode::opset() const {
  const auto found = opsets->find(domain());
  return found == opsets->end() ? 0 : found->second;
}

std::string FlatNode::label() const { return op() + node_label(*proto); }

Opsets opsets_of(const google::protobuf::RepeatedPtrField<pb::OperatorSetIdProto>& imports) {
  Opsets opsets;
  for (const pb::OperatorSetIdProto& import : imports)
    opsets[plain_domain(import.domain())] =
        static_cast<int>(std::min<std::int64_t>(import.version(), 1'000'000));
  return opsets;
}

Flat flatten(const pb::ModelProto& model) {
  Flat flat;
  const pb::GraphProto& graph = model.graph();
  flat.tensors = file_tensors(model);
  for (std::size_t i = 0; i < flat.tensors.size(); ++i) {
    flat.tensor_index[flat.tensors[i].name] = i;
    flat.names.insert(flat.tensors[i].name);
  }
  for (const pb::ValueInfoProto& input : graph.input()) flat.names.insert(input.name());
  for (const pb::NodeProto& node : graph.node())
    flat.names.insert(node.output().begin(), node.output().end());
  Flattener flattener(flat.names);
  flattener.add_functions(model);
  flattener.add_tensors(flat.tensors);
  flattener.graph(graph, std::make_shared<Opsets>(opsets_of(model.opset_import())));
  std::set<std::string> wanted;
  for (const pb::ValueInfoProto& output : graph.output()) wanted.insert(output.name());
  flat.nodes = prune(std::move(flattener.nodes), std::move(wanted));
  return flat;
}

std::vector<FlatNode> inline_function(const pb::FunctionProto& function, const FlatNode& call,
                                      std::set<std::string>& names) {
  Flattener flattener(names);
  flattener.body(function, call);
  std::set<std::string> wanted;
  for (std::size_t i = 0; i < call.outputs.size(); ++i)
    if (call.used[i]) wanted.insert(call.outputs[i]);
  return prune(std::move(flattener.nodes), std::move(wanted));
}

std::shared_ptr<const pb::FunctionProto> onnx_body(const FlatNode& node,
                                                   const std::vector<pb::TypeProto>& types) {
  const pb::OpSchema* schema = schema_of(node);
  if (!schema) return nullptr;
  auto body = std::make_shared<pb::FunctionProto>();
  if (const pb::FunctionProto* plain = plain_body(node)) {
    *body = *plain;
  } else if (schema->HasContextDependentFunction()) {
    pb::NodeProto call = *node.proto;
    call.clear_input();
    call.clear_output();
    for (const std::string& input : node.inputs) call.add_input(input);
    for (std::size_t i = 0; i < node.outputs.size(); ++i)
      call.add_output(node.used[i] ? node.outputs[i] : "");
    const pb::FunctionBodyBuildContextImpl context(call, types);
    if (!schema->BuildContextDependentFunction(context, *body, node.opset())) return nullptr;
  } else {
    return nullptr;
  }
  // Bodies refer to attributes that the node may have left at their defaults.
  for (const auto& [name, attribute] : schema->attributes())
    if (attribute.default_value.has_type()) {
      pb::AttributeProto* given = body->add_attribute_proto();
      *given = attribute.default_value;
      given->set_name(name);
    }
  return body;
}

std::vector<std::string> unknown_ops(const Flat& flat) {
  std::vector<std::string> out;
  std::set<std::pair<std::string, std::string>> seen;
  for (const FlatNode& node : flat.nodes) {
    if (!seen.insert({node.domain(), node.op()}).second || is_known(node, 4)) continue;
    const std::string domain = node.domain().empty() ? "ai.onnx" : node.domain();
    out.push_back(cat(domain, "::", node.op(), " (node '",
                      node.proto->name().empty() ? node.outputs[0] : node.proto->name(), "', opset ",
                      node.opset(), ")"));
  }
  return out;
}

bool all_ops_known_to_onnx(const Flat& flat) {
  return std::all_of(flat.nodes.begin(), flat.nodes.end(),
                     [](const FlatNode& node) { return schema_of(node) || has_entry(node); });
}

std::vector<std::string> unknown_ops(const OnnxModel& model) { return unknown_ops(flatten(model.proto)); }

}  // namespace onnxddp

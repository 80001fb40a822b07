#include "graph/pass.h"

#include <algorithm>
#include <set>

#include "graph/attributes.h"
#include "graph/nearest.h"
#include "graph/text.h"

namespace onnxddp {

void Pipeline::run(Graph& graph, std::string_view stop) const {
  if (!stop.empty()) {
    const std::vector<std::string> names = stages();
    if (std::find(names.begin(), names.end(), stop) == names.end()) {
      std::string list;
      for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
      throw usage_error(cat("there is no stage '", stop, "'", did_you_mean(stop, names)))
          .hint(cat("stages: ", list));
    }
  }
  for (const Pass& pass : passes_) {
    pass.run(graph);
    try {
      verify(graph);
    } catch (const InternalError& error) {
      throw InternalError(cat("after pass '", pass.name, "': ", error.what()));
    }
    if (pass.name == stop) return;
  }
}

std::vector<std::string> Pipeline::stages() const {
  std::vector<std::string> out;
  for (const Pass& pass : passes_)
    if (std::find(out.begin(), out.end(), pass.name) == out.end()) out.push_back(pass.name);
  return out;
}

namespace {

void verify_node(const Graph& graph, NodeId id, const std::vector<bool>& defined) {
  const Node& node = graph.node(id);
  for (ValueId input : node.inputs)
    CHECK(!input || defined[static_cast<std::size_t>(input.index)], "'", graph.value(input).name,
          "' is read before it is defined: ", dump_node(graph, id));
  try {
    const Attrs attrs = check_call(graph, *node.op, node.inputs, node.attrs);
    CHECK(attrs == node.attrs, "attributes are not canonical: ", dump_node(graph, id));
    const std::vector<TensorType> types = infer_types(graph, *node.op, node.inputs, node.attrs);
    CHECK(node.outputs.size() <= types.size(), "too many outputs: ", dump_node(graph, id));
    for (std::size_t i = 0; i < node.outputs.size(); ++i)
      CHECK(graph.value(node.outputs[i]).type == types[i], "inferred ", types[i].str(), ": ",
            dump_node(graph, id));
  } catch (const Error& error) {
    throw InternalError(cat(error.what(), ": ", dump_node(graph, id)));
  }
}

}  // namespace

void verify(const Graph& graph) {
  std::vector<bool> defined(graph.value_count());
  const auto define = [&](ValueId id) {
    CHECK(!defined[static_cast<std::size_t>(id.index)], "'", graph.value(id).name, "' is defined twice");
    CHECK(graph.find(graph.value(id).name) == id, "'", graph.value(id).name, "' is not in the name table");
    defined[static_cast<std::size_t>(id.index)] = true;
  };
  for (const std::vector<ValueId>* ids : {&graph.inputs, &graph.params, &graph.constants})
    for (ValueId id : *ids) define(id);
  for (NodeId id : graph.order) {
    verify_node(graph, id, defined);
    for (ValueId output : graph.node(id).outputs) {
      CHECK(graph.value(output).producer == id, "producer of '", graph.value(output).name, "'");
      define(output);
    }
  }
  std::set<ValueId> updated;
  for (const Update& update : graph.updates) {
    const Value& param = graph.value(update.param);
    CHECK(param.kind == Kind::param || param.kind == Kind::state, "update of '", param.name, "'");
    CHECK(defined[static_cast<std::size_t>(update.next.index)], "update of '", param.name,
          "' from an undefined value");
    CHECK(graph.value(update.next).type == param.type, "update of '", param.name, "' with another type");
    CHECK(updated.insert(update.param).second, "'", param.name, "' is updated twice");
  }
  std::set<std::string> names;
  for (const Output& output : graph.outputs) {
    CHECK(defined[static_cast<std::size_t>(output.value.index)], "output '", output.name, "' is undefined");
    CHECK(names.insert(output.name).second, "output '", output.name, "' is listed twice");
  }
}

void bind_dims(Graph& graph, const DimBindings& bindings) {
  const auto bind_value = [&](ValueId id) {
    Value& value = graph.value(id);
    value.type.shape = bind_shape(value.type.shape, bindings);
    if (!value.ints) return;
    for (Dim& dim : *value.ints) dim = dim.bind(bindings);
    if (value.kind == Kind::constant && !value.data && is_static(*value.ints)) {
      HostTensor data(value.type.dtype, static_shape(value.type.shape));
      for (std::size_t i = 0; i < value.ints->size(); ++i)
        data.set_double(static_cast<std::int64_t>(i), static_cast<double>((*value.ints)[i].value()));
      value.data = std::move(data);
    }
  };
  for (const std::vector<ValueId>* ids : {&graph.inputs, &graph.params, &graph.constants})
    for (ValueId id : *ids) bind_value(id);
  for (NodeId id : graph.order) {
    Node& node = graph.node(id);
    for (auto& [name, attr] : node.attrs)
      if (Dims* dims = std::get_if<Dims>(&attr)) attr = make_attr(bind_shape(*dims, bindings));
    node.attrs = check_call(graph, *node.op, node.inputs, std::move(node.attrs));
    for (ValueId output : node.outputs) bind_value(output);
    try {
      const std::vector<TensorType> types = infer_types(graph, *node.op, node.inputs, node.attrs);
      for (std::size_t i = 0; i < node.outputs.size(); ++i) {
        const Value& value = graph.value(node.outputs[i]);
        if (value.type != types[i])
          throw Error(cat(node.op->name, ": '", value.name, "' would be ", types[i].str(), " instead of ",
                          value.type.str(), " for these input sizes"));
      }
    } catch (Error& error) {
      if (!node.origin.empty()) error.add_in(node.origin);
      throw;
    }
  }
}

std::vector<std::string> free_symbols(const Graph& graph) {
  std::set<std::string> out;
  for (ValueId id : graph.inputs)
    for (const Dim& dim : graph.value(id).type.shape)
      for (const std::string& symbol : dim.symbols()) out.insert(symbol);
  return {out.begin(), out.end()};
}

}  // namespace onnxddp

#include "importer/onnx/batch.h"

#include <algorithm>

#include "graph/pass.h"

namespace onnxddp {

namespace {

std::optional<std::int64_t> leading(const pb::ValueInfoProto& info) {
  if (!info.type().has_tensor_type() || !info.type().tensor_type().has_shape()) return std::nullopt;
  const auto& shape = info.type().tensor_type().shape();
  if (shape.dim_size() == 0 || !shape.dim(0).has_dim_value()) return std::nullopt;
  return shape.dim(0).dim_value();
}

bool depends(const Shape& shape, const std::string& symbol) {
  return std::any_of(shape.begin(), shape.end(),
                     [&](const Dim& dim) { return dim.symbols().count(symbol) > 0; });
}

std::set<std::string> initializer_names(const pb::ModelProto& model) {
  std::set<std::string> names;
  for (const pb::TensorProto& tensor : model.graph().initializer()) names.insert(tensor.name());
  return names;
}

/// The first entry of a Reshape's constant shape when x has the symbol: what makes the element counts agree
/// and was the number at the old batch.
std::optional<Dim> reshape_leading(const BatchChange& change, const Shape& x, const Dims& to) {
  if (!depends(x, change.symbol)) return std::nullopt;
  const std::int64_t first = to[0].value();
  if (first <= 0) return std::nullopt;
  Dim rest = 1;
  for (std::size_t i = 1; i < to.size(); ++i) {
    if (to[i] == Dim(-1)) {
      if (first % change.old != 0 || (change.old == 1 && first != 1)) return std::nullopt;
      return Dim(first / change.old) * Dim::symbol(change.symbol);
    }
    rest *= to[i] == Dim(0) && i < x.size() ? x[i] : to[i];
  }
  if (rest == Dim(0)) return std::nullopt;
  const std::optional<Dim> lead = exact_div(numel(x), rest);
  if (!lead || lead->bind({{change.symbol, change.old}}) != Dim(first)) return std::nullopt;
  return lead;
}

}  // namespace

void BatchChange::apply(OnnxNode& node, Graph& graph) const {
  if (!node.domain.empty()) return;
  const bool reshape = node.op_type == "Reshape";
  if (!reshape && node.op_type != "Expand" && node.op_type != "ConstantOfShape") return;
  const std::size_t at = node.op_type == "ConstantOfShape" ? 0 : 1;
  if (!node.has(at)) return;
  const Value shape = graph.value(node.inputs[at]);
  if (!shape.ints || shape.ints->empty() || !is_static(*shape.ints)) return;
  Dims to = *shape.ints;
  if (reshape) {
    const std::optional<Dim> lead = reshape_leading(*this, node.type(0).shape, to);
    if (!lead) return;
    to[0] = *lead;
  } else {
    if (to[0] != Dim(old) || (old == 1 && !expand_ones)) return;
    to[0] = Dim::symbol(symbol);
  }
  if (to == *shape.ints) return;
  node.inputs[at] = graph.add_constant(graph.unique_name(shape.name + ".batch"), shape.type, to);
}

void BatchChange::verify(const pb::ModelProto& model, const Graph& graph) const {
  for (std::int64_t probe : {3, 5, 7}) {  // equalities that symbols leave open
    if (probe == old) continue;
    Graph copy = graph;
    bind_dims(copy, {{symbol, probe}});
  }
  for (int i = 0; i < model.graph().output_size(); ++i) {
    const std::optional<std::int64_t> declared = leading(model.graph().output(i));
    const Output& output = graph.outputs[static_cast<std::size_t>(i)];
    const Shape& shape = graph.value(output.value).type.shape;
    if (declared == old && (shape.empty() || shape[0] != Dim::symbol(symbol)))
      throw Error(cat("output '", output.name, "' would be ", graph.value(output.value).type));
  }
}

std::optional<std::int64_t> fixed_batch(const pb::ModelProto& model) {
  const std::set<std::string> initializers = initializer_names(model);
  for (const pb::ValueInfoProto& input : model.graph().input()) {
    if (initializers.count(input.name())) continue;
    const std::optional<std::int64_t> old = leading(input);
    if (!old || *old < 1) return std::nullopt;
    const auto& outputs = model.graph().output();
    const bool same = std::any_of(outputs.begin(), outputs.end(),
                                  [&](const pb::ValueInfoProto& output) { return leading(output) == old; });
    return same ? old : std::nullopt;
  }
  return std::nullopt;
}

std::vector<BatchChange> batch_changes(const pb::ModelProto& model) {
  std::vector<BatchChange> changes;
  if (const std::optional<std::int64_t> old = fixed_batch(model)) {
    std::set<std::string> taken;
    for (const pb::ValueInfoProto& input : model.graph().input())
      for (const auto& dim : input.type().tensor_type().shape().dim()) taken.insert(dim.dim_param());
    std::string symbol = "N";
    for (const char* name : {"N", "batch", "batch_size", "n"})
      if (!taken.count(symbol))
        break;
      else
        symbol = name;
    changes.push_back({symbol, *old, false});
    if (*old == 1) changes.push_back({symbol, *old, true});
  }
  changes.push_back({});
  return changes;
}

}  // namespace onnxddp

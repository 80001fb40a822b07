#include "graph/graph.h"

#include <algorithm>

namespace onnxddp {

std::string_view kind_name(Kind kind) {
  constexpr std::string_view kNames[] = {"input", "param", "state", "const", "computed"};
  return kNames[static_cast<std::size_t>(kind)];
}

Attr make_attr(const Dims& dims) {
  if (!is_static(dims)) return dims;
  return static_shape(dims);
}

Dims attr_dims(const Attr& attr) {
  if (const auto* ints = std::get_if<Ints>(&attr)) return to_shape(*ints);
  CHECK(std::holds_alternative<Dims>(attr), "attribute is not a list of dimensions");
  return std::get<Dims>(attr);
}

ValueId Graph::add_value(Value value) {
  const ValueId id{static_cast<int>(values_.size())};
  value.name = unique_name(value.name);
  names_.emplace(value.name, id.index);
  values_.push_back(std::move(value));
  return id;
}

ValueId Graph::add_input(const std::string& value_name, TensorType type) {
  const ValueId id = add_value({.name = value_name,
                                .type = std::move(type),
                                .kind = Kind::input,
                                .producer = {},
                                .data = {},
                                .ints = {}});
  inputs.push_back(id);
  return id;
}

ValueId Graph::add_param(const std::string& value_name, TensorType type, Kind kind) {
  CHECK(kind == Kind::param || kind == Kind::state);
  const ValueId id = add_value(
      {.name = value_name, .type = std::move(type), .kind = kind, .producer = {}, .data = {}, .ints = {}});
  params.push_back(id);
  return id;
}

namespace {
constexpr std::int64_t kMaxSymbolicElements = 64;

std::optional<Dims> whole_numbers(const HostTensor& data) {
  if (data.numel() > kMaxSymbolicElements || data.dtype() == DType::boolean) return std::nullopt;
  if (is_float(data.dtype())) return std::nullopt;
  Dims out;
  for (std::int64_t i = 0; i < data.numel(); ++i) out.emplace_back(data.as_int(i));
  return out;
}
}  // namespace

ValueId Graph::add_constant(const std::string& value_name, HostTensor data) {
  std::optional<Dims> ints = whole_numbers(data);
  TensorType type = data.type();
  const ValueId id = add_value({.name = value_name,
                                .type = std::move(type),
                                .kind = Kind::constant,
                                .producer = {},
                                .data = std::move(data),
                                .ints = std::move(ints)});
  constants.push_back(id);
  return id;
}

ValueId Graph::add_constant(const std::string& value_name, TensorType type, Dims contents) {
  if (is_static(contents)) {
    HostTensor data(type.dtype, static_shape(type.shape));
    for (std::size_t i = 0; i < contents.size(); ++i)
      data.set_double(static_cast<std::int64_t>(i), static_cast<double>(contents[i].value()));
    return add_constant(value_name, std::move(data));
  }
  const ValueId id = add_value({.name = value_name,
                                .type = std::move(type),
                                .kind = Kind::constant,
                                .producer = {},
                                .data = {},
                                .ints = std::move(contents)});
  constants.push_back(id);
  return id;
}

NodeId Graph::add_node(const OpDef& op, std::vector<ValueId> node_inputs, Attrs attrs, std::string origin) {
  const NodeId id{static_cast<int>(nodes_.size())};
  nodes_.push_back({&op, std::move(node_inputs), {}, std::move(attrs), std::move(origin)});
  return id;
}

ValueId Graph::add_result(NodeId producer, const std::string& value_name, TensorType type) {
  Node& made_by = node(producer);
  const ValueId id = add_value({.name = value_name,
                                .type = std::move(type),
                                .kind = Kind::computed,
                                .producer = producer,
                                .output = static_cast<int>(made_by.outputs.size()),
                                .data = {},
                                .ints = {}});
  made_by.outputs.push_back(id);
  return id;
}

ValueId Graph::find(std::string_view value_name) const {
  const auto at = names_.find(std::string(value_name));
  return at == names_.end() ? kNone : ValueId{at->second};
}

std::string Graph::unique_name(const std::string& hint) const {
  if (!hint.empty() && names_.find(hint) == names_.end()) return hint;
  int& suffix = next_suffix_.emplace(hint, 2).first->second;
  while (true) {
    std::string candidate = cat(hint.empty() ? "t" : hint, ".", suffix);
    if (names_.find(candidate) == names_.end()) return candidate;
    ++suffix;
  }
}

void Graph::rename(ValueId id, const std::string& new_name) {
  Value& renamed = value(id);
  if (renamed.name == new_name) return;
  CHECK(names_.find(new_name) == names_.end(), "name '", new_name, "' is taken");
  names_.erase(renamed.name);
  next_suffix_.clear();
  names_.emplace(new_name, id.index);
  renamed.name = new_name;
}

std::vector<std::vector<NodeId>> Graph::users() const {
  std::vector<std::vector<NodeId>> out(values_.size());
  for (NodeId id : order)
    for (ValueId input : node(id).inputs)
      if (input) out[index(input)].push_back(id);
  return out;
}

void Graph::replace_uses(ValueId from, ValueId to) {
  for (NodeId id : order)
    for (ValueId& input : node(id).inputs)
      if (input == from) input = to;
  for (Output& output : outputs)
    if (output.value == from) output.value = to;
  for (Update& update : updates)
    if (update.next == from) update.next = to;
}

ValueId Graph::update_of(ValueId param) const {
  for (const Update& update : updates)
    if (update.param == param) return update.next;
  return kNone;
}

}  // namespace onnxddp

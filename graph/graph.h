// The IR: values, nodes in order, outputs, updates. Nodes never write their inputs; mutation exists only as
// `update param <- value` on the graph.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "graph/tensor.h"
#include "graph/types.h"

namespace ONNXDDP_API onnxddp {

struct OpDef;

/// Index of a value or node in its graph; survives copies of the graph.
struct ValueId {
  int index = -1;
  explicit operator bool() const { return index >= 0; }
  auto operator<=>(const ValueId&) const = default;
};
struct NodeId {
  int index = -1;
  explicit operator bool() const { return index >= 0; }
  auto operator<=>(const NodeId&) const = default;
};
/// An optional input that is not given; printed `_`.
inline constexpr ValueId kNone{};

/// input: fed every step. param: trained. state: everything else that persists between steps (buffers, frozen
/// weights, optimizer state, hyper-parameters). constant: data in the graph. computed: a node's output.
enum class Kind : std::uint8_t { input, param, state, constant, computed };
std::string_view kind_name(Kind kind);

/// Attribute value: integer (also bool), float, string, integers, floats, or dimensions (shapes with
/// symbols). A list of plain integers is always held as Ints, never as Dims (see make_attr).
using Attr = std::variant<std::int64_t, double, std::string, Ints, std::vector<double>, Dims>;
using Attrs = std::map<std::string, Attr, std::less<>>;
/// Dims as an attribute: Ints when all are constant, so that equal lists compare equal.
Attr make_attr(const Dims& dims);
Dims attr_dims(const Attr& attr);

struct Value {
  std::string name;
  TensorType type;
  Kind kind = Kind::computed;
  NodeId producer;                 // of a computed value
  int output = 0;                  // which output of the producer
  std::optional<HostTensor> data;  // of a constant (absent if `ints` is symbolic)
  std::optional<Dims> ints;        // symbolic contents of a small tensor of whole numbers (up to 64 elements)
};

struct Node {
  const OpDef* op = nullptr;
  std::vector<ValueId> inputs, outputs;
  Attrs attrs;
  std::string origin;  // "node 17 'conv1', Conv, opset 13" of the imported file; derived nodes inherit it.
                       // Not in the text
};

/// `param` holds `next` after the step.
struct Update {
  ValueId param, next;
};

struct Output {
  std::string name;
  ValueId value;
};

class Graph {
 public:
  explicit Graph(std::string graph_name = "g") : name(std::move(graph_name)) {}

  std::string name;
  std::vector<NodeId> order;    // execution order; a node that is not in it is dead
  std::vector<ValueId> inputs;  // Kind::input, in order of declaration
  std::vector<ValueId> params;  // Kind::param and Kind::state, in order of declaration
  std::vector<ValueId> constants;
  std::vector<Update> updates;
  std::vector<Output> outputs;

  Value& value(ValueId id) { return values_[index(id)]; }
  const Value& value(ValueId id) const { return values_[index(id)]; }
  Node& node(NodeId id) { return nodes_[index(id)]; }
  const Node& node(NodeId id) const { return nodes_[index(id)]; }
  std::size_t value_count() const { return values_.size(); }
  std::size_t node_count() const { return nodes_.size(); }

  ValueId add_input(const std::string& name, TensorType type);
  /// Kind::param or Kind::state.
  ValueId add_param(const std::string& name, TensorType type, Kind kind = Kind::param);
  ValueId add_constant(const std::string& name, HostTensor data);
  /// A constant whose elements are dimension polynomials, e.g. `f32[] = [20*N]`.
  ValueId add_constant(const std::string& name, TensorType type, Dims contents);
  /// A node without outputs yet and not yet in any order; Builder::emit is the usual way.
  NodeId add_node(const OpDef& op, std::vector<ValueId> inputs, Attrs attrs, std::string origin = {});
  ValueId add_result(NodeId producer, const std::string& name, TensorType type);

  /// The value of that name, or kNone.
  ValueId find(std::string_view name) const;
  /// `hint`, or `hint.2`, `hint.3`, … if it is taken. Does not reserve the name.
  std::string unique_name(const std::string& hint) const;
  /// Renames; the new name must be free.
  void rename(ValueId id, const std::string& name);

  /// For every value the nodes of `order` that read it (once per reading input), in order.
  std::vector<std::vector<NodeId>> users() const;
  /// Rewires all readers, outputs and update sources from `from` to `to`.
  void replace_uses(ValueId from, ValueId to);
  /// The `next` of a param, or kNone.
  ValueId update_of(ValueId param) const;
  bool is_constant(ValueId id) const { return value(id).kind == Kind::constant; }

 private:
  static std::size_t index(ValueId id) {
    CHECK(id.index >= 0, "absent value");
    return static_cast<std::size_t>(id.index);
  }
  static std::size_t index(NodeId id) {
    CHECK(id.index >= 0, "absent node");
    return static_cast<std::size_t>(id.index);
  }
  ValueId add_value(Value value);

  std::deque<Value> values_;
  std::deque<Node> nodes_;
  std::unordered_map<std::string, int> names_;
  mutable std::unordered_map<std::string, int> next_suffix_;
};

}  // namespace onnxddp

template <>
struct std::hash<onnxddp::ValueId> {
  std::size_t operator()(onnxddp::ValueId id) const noexcept { return std::hash<int>()(id.index); }
};
template <>
struct std::hash<onnxddp::NodeId> {
  std::size_t operator()(onnxddp::NodeId id) const noexcept { return std::hash<int>()(id.index); }
};

// Builder::emit adds a checked, typed, named node; Expr is the language of gradient rules, losses,
// optimizers.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

class Builder;
class Registry;

/// A value in a graph under construction. Operators emit nodes; a double operand becomes a scalar constant of
/// the other operand's dtype. Shapes broadcast.
class Expr {
 public:
  Expr() = default;
  Expr(Builder& builder, ValueId id) : builder_(&builder), id_(id) {}
  explicit operator bool() const { return static_cast<bool>(id_); }
  ValueId id() const { return id_; }
  Builder& builder() const;
  const TensorType& type() const;
  const Shape& shape() const { return type().shape; }
  DType dtype() const { return type().dtype; }
  std::size_t rank() const { return type().shape.size(); }

 private:
  Builder* builder_ = nullptr;
  ValueId id_;
};

Expr operator+(Expr a, Expr b);
Expr operator-(Expr a, Expr b);
Expr operator*(Expr a, Expr b);
Expr operator/(Expr a, Expr b);
Expr operator-(Expr a);
Expr operator+(Expr a, double b);
Expr operator-(Expr a, double b);
Expr operator*(Expr a, double b);
Expr operator/(Expr a, double b);
Expr operator+(double a, Expr b);
Expr operator-(double a, Expr b);
Expr operator*(double a, Expr b);
Expr operator/(double a, Expr b);

// The words of rules. All emit canonical ops.
Expr exp(Expr x);
Expr log(Expr x);
Expr sqrt(Expr x);
Expr reciprocal(Expr x);
Expr reshape(Expr x, const Shape& shape);
Expr transpose(Expr x, const Ints& perm);
Expr expand(Expr x, const Shape& shape);
Expr cast(Expr x, DType dtype);
/// Sums over the axes that broadcasting `shape` to x's shape added or stretched; the result has `shape`.
Expr sum_to(Expr x, const Shape& shape);
/// Sum, mean over axes (all when empty).
Expr reduce_sum(Expr x, Ints axes, bool keepdims);
Expr reduce_mean(Expr x, Ints axes, bool keepdims);
Expr matmul(Expr a, Expr b);
Expr gemm(Expr a, Expr b, bool trans_a, bool trans_b);
/// Any op with one output.
Expr call(std::string_view op, std::vector<Expr> inputs, Attrs attrs = {});

class Builder {
 public:
  /// Appends to graph.order.
  explicit Builder(Graph& graph);
  /// Appends to `order` instead (passes that rebuild or insert).
  Builder(Graph& graph, std::vector<NodeId>& order);
  /// Embedding programs and tests: ops from another registry.
  Builder(Graph& graph, std::vector<NodeId>& order, const Registry& registry);

  Graph& graph() const { return graph_; }
  const Registry& registry() const { return registry_; }

  /// Adds a node of op `op`: checks arity, kinds and attributes against the entry (unknown or missing
  /// attributes are an Error; attributes equal to the default are dropped), infers output types and small
  /// integer contents. `names` name the outputs; missing or taken ones are derived from the hint. `outputs`:
  /// how many outputs (default: all the signature's non-optional ones).
  std::vector<ValueId> emit(std::string_view op, std::vector<ValueId> inputs, Attrs attrs = {},
                            std::vector<std::string> names = {}, std::size_t outputs = 0);
  Expr call(std::string_view op, const std::vector<Expr>& inputs, Attrs attrs = {},
            const std::string& name = {});
  Expr expr(ValueId id) { return Expr(*this, id); }
  /// A scalar constant of dtype; equal ones are shared.
  Expr scalar(DType dtype, double value);
  Expr constant(const HostTensor& data, const std::string& name = {});
  /// A scalar whose value is a dimension polynomial.
  Expr dim_scalar(DType dtype, const Dim& value);

  /// Names of nodes that are emitted without an explicit name: `hint`, `hint.2`, …
  void set_hint(std::string hint) { hint_ = std::move(hint); }
  const std::string& hint() const { return hint_; }
  /// Origin given to new nodes.
  void set_origin(std::string origin) { origin_ = std::move(origin); }
  const std::string& origin() const { return origin_; }

 private:
  Graph& graph_;
  std::vector<NodeId>& order_;
  const Registry& registry_;
  std::string hint_ = "t";
  std::string origin_;
};

}  // namespace onnxddp

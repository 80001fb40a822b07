// What an op entry may say, and the contexts its rules run in. One entry per op, in ops/<family>.cpp.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "graph/builder.h"
#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

/// An attribute an op accepts. `required` ones have no default and are always printed.
struct AttrSpec {
  std::string name;
  Attr default_value = std::int64_t{0};
  bool required = false;
};

enum class Lane : std::uint8_t { compute, comm, copy };

struct Traits {
  Lane lane = Lane::compute;
  bool random = false;                              // never merged with an equal node
  bool collective = false;                          // never moved, merged or removed
  std::vector<std::pair<int, int>> in_place = {};   // {input, output} that may share memory
  std::vector<int> nondifferentiable_outputs = {};  // e.g. indices of MaxPool
};

/// What `infer` and `fold_dims` see: types and known integer contents of the inputs, attributes; and, to
/// fill, the types of the outputs.
class Inference {
 public:
  Inference(const Graph& graph, const OpDef& op, std::span<const ValueId> inputs, const Attrs& attrs);

  std::size_t count() const { return inputs_.size(); }
  /// Whether input i is given.
  bool has(std::size_t i) const { return i < inputs_.size() && inputs_[i]; }
  const TensorType& x(std::size_t i) const;
  const Shape& shape(std::size_t i) const { return x(i).shape; }
  std::size_t rank(std::size_t i) const { return x(i).shape.size(); }
  /// Contents of a small integer tensor where known, symbolically.
  std::optional<Dims> ints(std::size_t i) const;

  bool has_attr(std::string_view name) const;
  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  bool flag(std::string_view name) const { return integer(name) != 0; }
  std::string text(std::string_view name) const;
  Ints integers(std::string_view name) const;
  Dims dims(std::string_view name) const;

  /// Sets the type of output i (default: appends the next).
  void y(TensorType type) { outputs.push_back(std::move(type)); }
  std::vector<TensorType> outputs;

  /// Throws Error "OP: message" with the input types as the place.
  template <class... Ts>
  [[noreturn]] void fail(const Ts&... parts) const {
    fail_with(cat(parts...));
  }
  template <class... Ts>
  void require(bool condition, const Ts&... parts) const {
    if (!condition) fail_with(cat(parts...));
  }

 private:
  [[noreturn]] void fail_with(const std::string& message) const;

  const Graph& graph_;
  const OpDef& op_;
  std::span<const ValueId> inputs_;
  const Attrs& attrs_;
};

/// What a gradient rule sees of its node, and where it leaves the gradients. Rules ignore accumulation,
/// broadcasting (a gradient with the output's broadcast shape is summed to the input's by the pass) and
/// whether anyone needs the result.
class Gradient {
 public:
  Gradient(Builder& builder, const Node& node, std::vector<ValueId> output_grads);

  std::size_t count() const { return node_.inputs.size(); }
  bool has(std::size_t i) const { return i < node_.inputs.size() && node_.inputs[i]; }
  Expr x(std::size_t i) const;
  Expr y(std::size_t i = 0) const;
  /// Gradient of output i; throws InternalError if none flows (ask has_dy first when there are several
  /// outputs).
  Expr dy(std::size_t i = 0) const;
  bool has_dy(std::size_t i) const { return i < dys_.size() && dys_[i]; }
  const TensorType& type(std::size_t i) const;  // of input i
  /// Name of the op that produces input i ("" for none): for gradient regions such as BatchStats +
  /// BatchNormApply.
  std::string_view head(std::size_t i) const;

  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  bool flag(std::string_view name) const { return integer(name) != 0; }
  std::string text(std::string_view name) const;
  Ints integers(std::string_view name) const;
  Dims dims(std::string_view name) const;
  const Attrs& attrs() const { return node_.attrs; }
  Builder& builder() const { return builder_; }

  /// Gradient of input i (ignored when that input is absent).
  void dx(std::size_t i, Expr gradient);
  /// The gradient of input i is `piece` placed at [starts, ends) with steps along axes, zero elsewhere. The
  /// pass assembles the pieces of one tensor once (Pad / Concat) instead of adding full-size tensors.
  void dx_piece(std::size_t i, Expr piece, Ints axes, Dims starts, Dims ends, Ints steps);

  struct Piece {
    std::size_t input;
    Expr value;
    bool whole = true;
    Ints axes, steps;
    Dims starts, ends;
  };
  const std::vector<Piece>& results() const { return results_; }

 private:
  Builder& builder_;
  const Node& node_;
  std::vector<ValueId> dys_;
  std::vector<Piece> results_;
};

/// What a decomposition sees; it must set every output that has readers.
class Compose {
 public:
  Compose(Builder& builder, const Node& node)
      : builder_(builder), node_(node), results_(node.outputs.size()) {}
  bool has(std::size_t i) const { return i < node_.inputs.size() && node_.inputs[i]; }
  std::size_t count() const { return node_.inputs.size(); }
  Expr x(std::size_t i) const;
  const TensorType& type(std::size_t i) const;
  const TensorType& out_type(std::size_t i = 0) const;
  std::int64_t integer(std::string_view name) const;
  double number(std::string_view name) const;
  bool flag(std::string_view name) const { return integer(name) != 0; }
  std::string text(std::string_view name) const;
  Ints integers(std::string_view name) const;
  Dims dims(std::string_view name) const;
  const Attrs& attrs() const { return node_.attrs; }
  Builder& builder() const { return builder_; }
  void y(Expr value) { y(0, value); }
  void y(std::size_t i, Expr value);
  const std::vector<ValueId>& results() const { return results_; }

 private:
  Builder& builder_;
  const Node& node_;
  std::vector<ValueId> results_;
};

/// A protobuf-free view of an ONNX node, which `onnx.import` turns into canonical nodes. Optional things that
/// are absent read as the given default.
class OnnxNode {
 public:
  explicit OnnxNode(Builder& builder) : b(builder) {}
  Builder& b;
  std::string op_type, domain, name;
  int opset = 0;                  // version of `domain` that the node's model imports
  std::vector<ValueId> inputs;    // kNone where absent
  std::size_t output_count = 1;   // outputs listed in the file, absent ones included
  std::vector<bool> output_used;  // whether output i is named and read or a graph output
  Attrs attrs;                    // ints, floats (decimal_of), strings, lists
  std::map<std::string, HostTensor, std::less<>> tensors;  // tensor attributes
  bool batch_norm_train = true;                            // --bn: whether batch norms use batch statistics
  bool batch_norm_unbiased = true;  // --bn-running-var: running variance as PyTorch keeps it
  bool training = true;             // whether dropout is active

  bool has(std::size_t i) const { return i < inputs.size() && inputs[i]; }
  Expr x(std::size_t i) const;
  const TensorType& type(std::size_t i) const;
  std::size_t rank(std::size_t i) const { return type(i).shape.size(); }
  bool has_attr(std::string_view attr) const { return attrs.find(attr) != attrs.end(); }
  std::int64_t integer(std::string_view attr, std::int64_t otherwise) const;
  double number(std::string_view attr, double otherwise) const;
  std::string text(std::string_view attr, std::string otherwise) const;
  Ints integers(std::string_view attr, Ints otherwise) const;
  /// Symbolic contents of input i; throws Error with a reason if they cannot be known before the run.
  Dims ints(std::size_t i, std::string_view what) const;
  /// Attribute `name` if present, else contents of input i if present, else nothing (axes moved from
  /// attribute to input over the opsets).
  std::optional<Dims> attr_or_input(std::string_view attr, std::size_t i) const;
  /// The number in a one-element constant input i; throws Error otherwise.
  double constant(std::size_t i, std::string_view what) const;

  void y(Expr value) { y(0, value); }
  void y(std::size_t i, Expr value);
  std::vector<ValueId> results;
  /// Buffers to update after the step, e.g. running statistics: `buffer <- next`.
  std::vector<Update> updates;
};

/// The op in ONNX. `versions` of the standard domain from `since` on are all accepted.
struct Onnx {
  std::string domain = "";  // "" = ai.onnx
  int since = 0;            // first opset that has it; 0: not an ONNX op
  /// Normalises every accepted version to canonical nodes. Null: same name, declared attributes copied,
  /// inputs as they are.
  std::function<void(OnnxNode&)> import = nullptr;
};

using InferRule = std::function<void(Inference&)>;
using FoldRule = std::function<std::optional<Dims>(const Inference&)>;
using ComposeRule = std::function<void(Compose&)>;
using GradientRule = std::function<void(Gradient&)>;

/// One op. Mandatory fields have no default initialiser: with -Wextra a forgotten one is a compile error.
/// Field order in every entry: name, signature, attrs, traits, onnx, infer, fold_dims, decompose, gradient,
/// kinks, flops, samples.
struct OpDef {
  std::string name;
  /// "(x: float, w: float, b?: float) -> y, mask": names, kinds (float, int, bool, any, number = float or
  /// int); `?` optional, `...` variadic last. Arity and kinds are checked from it in one place.
  std::string signature;
  std::vector<AttrSpec> attrs = {};
  Traits traits = {};
  Onnx onnx;
  InferRule infer;
  FoldRule fold_dims = nullptr;
  /// The op's definition in other ops. Ops whose gradient is from_decomposition are expanded by canonicalise.
  ComposeRule decompose = nullptr;
  GradientRule gradient;
  /// Points where the gradient jumps, in terms of any input value (finite differences skip their
  /// neighbourhood).
  std::vector<double> kinks = {};
  /// Floating-point operations of one run; null: one per output element.
  std::function<Dim(const Inference&)> flops = nullptr;
  /// "Conv(f32[2,3,5,5], f32[4,3,3,3]) {pads=[1,1,1,1]}"; see parse_sample in text.h.
  std::vector<std::string> samples;
};

/// Gradient sentinels (distinguished by find_sentinel): no gradient because zero almost everywhere; by
/// expanding the decomposition; none exists (autodiff reports the path).
void zero_almost_everywhere(Gradient& g);
void from_decomposition(Gradient& g);
void not_differentiable(Gradient& g);
enum class GradientKind : std::uint8_t { rule, zero, decomposition, none };
GradientKind gradient_kind(const OpDef& op);

/// One parsed input or output of a signature.
struct Param {
  std::string name, kind;
  bool optional = false, variadic = false;
};
struct Signature {
  std::vector<Param> inputs, outputs;
};
/// Throws InternalError on a malformed signature.
Signature parse_signature(const std::string& text);

// Common infer rules.
void same_as_first_input(Inference& i);
/// NumPy broadcasting of all inputs; equal dtypes required.
void broadcast_inputs(Inference& i);

}  // namespace onnxddp

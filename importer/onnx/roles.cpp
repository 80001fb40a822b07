// Which tensors of a file train: the rule of design A2.
#include <re2/re2.h>

#include <algorithm>

#include "importer/onnx/proto.h"

namespace onnxddp {

std::string_view role_name(Role role) {
  switch (role) {
    case Role::parameter: return "parameter";
    case Role::buffer: return "buffer";
    case Role::frozen: return "frozen";
    case Role::constant: return "constant";
    case Role::input: return "input";
    case Role::output: return "output";
  }
  throw InternalError("unknown role");
}

namespace {

/// An input of an op that holds a parameter or a running statistic.
struct Slot {
  const char* op;
  std::size_t input;
  const char* what;
  bool buffer = false;
};

const Slot kSlots[] = {
    {"Conv", 1, "W"},
    {"Conv", 2, "B"},
    {"ConvTranspose", 1, "W"},
    {"ConvTranspose", 2, "B"},
    {"Gemm", 0, "W"},
    {"Gemm", 1, "W"},
    {"Gemm", 2, "B"},
    {"MatMul", 0, "W"},
    {"MatMul", 1, "W"},
    {"BatchNormalization", 1, "scale"},
    {"BatchNormalization", 2, "bias"},
    {"BatchNormalization", 3, "running mean", true},
    {"BatchNormalization", 4, "running variance", true},
    {"InstanceNormalization", 1, "scale"},
    {"InstanceNormalization", 2, "bias"},
    {"GroupNormalization", 1, "scale"},
    {"GroupNormalization", 2, "bias"},
    {"LayerNormalization", 1, "scale"},
    {"LayerNormalization", 2, "bias"},
    {"RMSNormalization", 1, "scale"},
    {"PRelu", 1, "slope"},
    {"Gather", 0, "table"},
    {"LSTM", 1, "W"},
    {"LSTM", 2, "R"},
    {"LSTM", 3, "B"},
    {"LSTM", 7, "P"},
    {"GRU", 1, "W"},
    {"GRU", 2, "R"},
    {"GRU", 3, "B"},
    {"RNN", 1, "W"},
    {"RNN", 2, "R"},
    {"RNN", 3, "B"},
};

bool is_product(const FlatNode& node) {
  return node.is("Conv") || node.is("ConvTranspose") || node.is("Gemm") || node.is("MatMul");
}
bool is_arithmetic(const FlatNode& node) {
  return node.is("Add") || node.is("Sub") || node.is("Mul") || node.is("Div");
}

/// What the uses of one tensor say.
struct Uses {
  std::string parameter, buffer;  // the reason, if any
  std::string operand;            // of Add, Sub, Mul, Div outside a slot: trains with more than one element
  std::string other;              // the first use of another kind
  bool read = false;
};

class Tracer {
 public:
  explicit Tracer(const Flat& flat) : flat_(flat), uses(flat.tensors.size()) {
    for (std::size_t i = 0; i < flat.nodes.size(); ++i)
      for (const std::string& output : flat.nodes[i].outputs) producer_[output] = i;
    for (const FlatNode& node : flat.nodes)
      for (std::size_t i = 0; i < node.inputs.size(); ++i) look(node, i);
  }

 private:
  const FlatNode* producer(const std::string& name) const {
    const auto found = producer_.find(name);
    return found == producer_.end() ? nullptr : &flat_.nodes[found->second];
  }

  /// The tensors behind `name` through views; a Cast to integers is none.
  void roots(const std::string& name, std::set<std::size_t>& out, std::set<std::string>& seen) const {
    if (!seen.insert(name).second) return;
    const auto tensor = flat_.tensor_index.find(name);
    if (tensor != flat_.tensor_index.end()) out.insert(tensor->second);
    const FlatNode* node = producer(name);
    if (!node || !node->domain().empty() || seen.size() > 1000) return;
    static const std::set<std::string> kViews = {"Transpose", "Identity",  "Reshape", "Cast",
                                                 "Squeeze",   "Unsqueeze", "Slice",   "Split"};
    if (node->is("Concat")) {
      for (const std::string& input : node->inputs) roots(input, out, seen);
    } else if (kViews.count(node->op()) && !node->inputs.empty()) {
      if (node->is("Cast")) {
        const pb::AttributeProto* to = find_attribute(*node->proto, "to");
        const auto dtype = to ? dtype_of_proto(static_cast<int>(to->i())) : std::nullopt;
        if (!dtype || !is_float(*dtype)) return;
      }
      roots(node->inputs[0], out, seen);
    }
  }

  /// Says of input i of the node what it means to the tensors behind it.
  void look(const FlatNode& node, std::size_t i) {
    const std::string& name = node.inputs[i];
    if (name.empty()) return;
    const auto direct = flat_.tensor_index.find(name);
    if (direct != flat_.tensor_index.end()) {
      Uses& use = uses[direct->second];
      use.read = true;
      if (use.other.empty()) use.other = cat("input ", i, " of ", node.label());
    }
    if (!node.domain().empty()) return;
    for (const Slot& slot : kSlots)
      if (slot.input == i && node.op() == slot.op)
        mark(name, slot.buffer ? &Uses::buffer : &Uses::parameter, cat(slot.what, " of ", node.label()));
    if (!is_arithmetic(node) || node.inputs.size() != 2) return;
    const FlatNode* before = producer(node.inputs[1 - i]);
    if (node.is("Add") && before && is_product(*before))
      return mark(name, &Uses::parameter, cat("bias of ", before->label()));
    mark(name, &Uses::operand, cat("operand of ", node.label()));
  }

  void mark(const std::string& name, std::string Uses::*field, const std::string& reason) {
    std::set<std::size_t> found;
    std::set<std::string> seen;
    roots(name, found, seen);
    for (std::size_t k : found)
      if ((uses[k].*field).empty()) uses[k].*field = reason;
  }

  const Flat& flat_;
  std::unordered_map<std::string, std::size_t> producer_;

 public:
  std::vector<Uses> uses;
};

/// Only zeros and values of at most -1e4, at least one of these: an attention mask, not a weight.
bool is_mask(const HostTensor& value) {
  bool negative = false;
  for (std::int64_t i = 0; i < value.numel(); ++i) {
    const double v = value.as_double(i);
    if (v != 0 && !(v <= -1e4)) return false;
    negative |= v != 0;
  }
  return negative;
}

class Pattern {
 public:
  Pattern(const std::string& flag, const std::string& text) : flag_(flag), text_(text) {
    if (text.empty()) return;
    RE2::Options quiet;
    quiet.set_log_errors(false);
    pattern_ = std::make_unique<RE2>(text, quiet);
    if (!pattern_->ok())
      throw usage_error(cat(flag, " '", text, "' is not a regular expression: ", pattern_->error()));
  }
  bool matches(const std::string& name) {
    if (!pattern_ || !RE2::FullMatch(name, *pattern_)) return false;
    return used_ = true;
  }
  /// Throws Error if the pattern matched none of the names that can train.
  void finish(const std::vector<TensorRole>& roles) const {
    if (!pattern_ || used_) return;
    std::string names;
    int count = 0;
    for (const TensorRole& role : roles)
      if (role.role == Role::parameter && count++ < 5) names += (names.empty() ? "" : ", ") + role.name;
    throw usage_error(cat(flag_, " '", text_, "' matches no tensor that can train"))
        .hint(
            cat("patterns match whole names", names.empty() ? "" : "; parameters are for example " + names));
  }

 private:
  std::string flag_, text_;
  std::unique_ptr<RE2> pattern_;
  bool used_ = false;
};

TensorRole decide(const FileTensor& tensor, const TensorType& type, const Uses& use) {
  TensorRole out{tensor.name, type, Role::constant, ""};
  if (!use.read) return out.reason = "no path to an output", out;
  if (!is_float(type.dtype)) return out.reason = use.other, out;
  if (!use.buffer.empty()) return out.role = Role::buffer, out.reason = use.buffer, out;
  if (!use.parameter.empty()) return out.role = Role::parameter, out.reason = use.parameter, out;
  const std::int64_t count = numel(static_shape(type.shape));
  if (use.operand.empty() || count == 0) return out.reason = use.other, out;
  if (count == 1) return out.reason = use.operand + ", one element: trains only by --train", out;
  if (tensor.has_value() && is_mask(tensor.value())) return out.reason = use.operand + ", a mask", out;
  return out.role = Role::parameter, out.reason = use.operand, out;
}

}  // namespace

std::vector<TensorRole> assign_roles(const Flat& flat, const ImportOptions& options) {
  const Tracer tracer(flat);
  Pattern train("--train", options.train), freeze("--freeze", options.freeze);
  std::vector<TensorRole> roles;
  for (std::size_t i = 0; i < flat.tensors.size(); ++i) {
    const FileTensor& tensor = flat.tensors[i];
    const Uses& use = tracer.uses[i];
    const std::optional<TensorType> type = tensor.type();
    if (!type) {
      roles.push_back({tensor.name,
                       {},
                       Role::constant,
                       use.read ? "element type is not supported" : "no path to an output"});
      continue;
    }
    TensorRole role = decide(tensor, *type, use);
    const bool may_train = use.read && is_float(type->dtype) && role.role != Role::buffer;
    if (may_train && freeze.matches(tensor.name)) {
      if (role.role == Role::parameter)
        role = {role.name, role.type, Role::frozen, role.reason + ", --freeze"};
    } else if (may_train && train.matches(tensor.name) && role.role != Role::parameter) {
      role = {role.name, role.type, Role::parameter, "--train"};
    }
    roles.push_back(std::move(role));
  }
  train.finish(roles);
  freeze.finish(roles);
  return roles;
}

}  // namespace onnxddp

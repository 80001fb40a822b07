#include "executor/plan/binding.h"

#include <algorithm>
#include <optional>

namespace onnxddp {
namespace {

/// The value of symbol `s` for which `dim`, linear in it, equals `size`; nothing if there is none.
std::optional<std::int64_t> solve(const Dim& dim, const std::string& s, std::int64_t size) {
  const Dim zero = dim.bind({{s, 0}}), one = dim.bind({{s, 1}});
  if (!zero.is_constant() || !one.is_constant()) return {};
  const std::int64_t slope = one.value() - zero.value();
  if (slope == 0) return {};
  const std::int64_t value = (size - zero.value()) / slope;
  if (dim.bind({{s, value}}).value() != size) return {};
  return value;
}

class Binding {
 public:
  Binding(const std::string& program, const Inputs& inputs, const Feeds& feeds)
      : program_(program), inputs_(inputs), feeds_(feeds) {}

  DimBindings run(const std::vector<std::string>& symbols) {
    check_names();
    for (const auto& [name, type] : inputs_) check_kind(name, type);
    for (bool more = true; more;) {
      more = false;
      for (const auto& [name, type] : inputs_)
        for (std::size_t k = 0; k < type.shape.size(); ++k)
          more |= learn(type.shape[k], feed(name).shape()[k]);
    }
    for (const auto& [name, type] : inputs_) check_shape(name, type);
    for (const std::string& s : symbols)
      if (!dims_.count(s))
        throw Error(
            cat("dimension ", s, " of '", program_, "' does not follow from the shapes of its inputs"));
    return std::move(dims_);
  }

 private:
  const HostTensor& feed(const std::string& name) const { return feeds_.find(name)->second; }

  void check_names() const {
    for (const auto& [name, type] : inputs_)
      if (!feeds_.count(name))
        throw Error(cat("input '", name, "' of '", program_, "' is not fed")).at(cat(name, ": ", type));
    for (const auto& feed : feeds_) {
      const auto same = [&](const auto& input) { return input.first == feed.first; };
      if (std::none_of(inputs_.begin(), inputs_.end(), same))
        throw Error(cat("'", program_, "' has no input '", feed.first, "'"))
            .at(cat(feed.first, ": ", feed.second.type()));
    }
  }

  void check_kind(const std::string& name, const TensorType& type) const {
    if (feed(name).dtype() != type.dtype || feed(name).shape().size() != type.shape.size())
      misfit(name, type);
  }

  bool learn(const Dim& dim, std::int64_t size) {
    const std::set<std::string> symbols = dim.symbols();
    if (symbols.size() != 1 || dims_.count(*symbols.begin())) return false;
    const auto value = solve(dim, *symbols.begin(), size);
    if (value && *value >= 0) dims_[*symbols.begin()] = *value;
    return value && *value >= 0;
  }

  void check_shape(const std::string& name, const TensorType& type) const {
    for (std::size_t k = 0; k < type.shape.size(); ++k) {
      const Dim bound = type.shape[k].bind(dims_);
      if (!bound.is_constant() || bound.value() != feed(name).shape()[k]) misfit(name, type);
    }
  }

  [[noreturn]] void misfit(const std::string& name, const TensorType& type) const {
    std::string with;
    for (const auto& [s, value] : dims_) with += cat(with.empty() ? " with " : ", ", s, "=", value);
    throw Error(cat("input '", name, "' of '", program_, "' is ", type, with, ", but ", feed(name).type(),
                    " is fed"));
  }

  const std::string& program_;
  const Inputs& inputs_;
  const Feeds& feeds_;
  DimBindings dims_;
};

}  // namespace

DimBindings bind_feeds(const std::string& program, const Inputs& inputs,
                       const std::vector<std::string>& symbols, const Feeds& feeds) {
  return Binding(program, inputs, feeds).run(symbols);
}

}  // namespace onnxddp

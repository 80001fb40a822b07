// Reading `NAME:key=value,…` options of losses, optimizers, schedules: unknown keys and bad values are usage
// errors.
#pragma once

#include <string>
#include <vector>

#include "graph/passes/passes.h"

namespace ONNXDDP_API onnxddp {

class OptionReader {
 public:
  /// `what` names the owner in errors, e.g. "--optimizer sgd".
  OptionReader(std::string what, const OptionMap& options) : what_(std::move(what)), options_(options) {}

  /// Throws usage Error if a key that is not in `known` is given, with the nearest one.
  void only(const std::vector<std::string>& known) const;
  bool has(const std::string& key) const { return options_.find(key) != options_.end(); }
  double number(const std::string& key, double otherwise) const;
  std::int64_t integer(const std::string& key, std::int64_t otherwise) const;
  bool flag(const std::string& key, bool otherwise) const;
  std::string text(const std::string& key, std::string otherwise) const;
  /// Throws usage Error "--optimizer sgd: momentum must be …, not -1" unless `ok`.
  void require(bool ok, const std::string& key, const std::string& rule) const;

 private:
  const std::string& value(const std::string& key) const { return options_.find(key)->second; }
  std::string what_;
  const OptionMap& options_;
};

}  // namespace onnxddp

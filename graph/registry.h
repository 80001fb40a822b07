// The list of op families, and look-up by name.
#pragma once

#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "graph/op.h"

namespace ONNXDDP_API onnxddp {

/// The known ops. An embedding program passes extra entries; they must not repeat a name.
class Registry {
 public:
  explicit Registry(std::span<const OpDef> extra = {});
  /// The entry, or null.
  const OpDef* find(std::string_view name) const;
  const OpDef& get(std::string_view name) const;  // throws Error with near matches
  /// The entry that imports ONNX's (domain, op_type), or null.
  const OpDef* find_onnx(std::string_view domain, std::string_view op_type) const {
    return onnx_find(domain, op_type);
  }
  /// All entries, sorted by name.
  const std::vector<const OpDef*>& all() const { return all_; }

 private:
  const OpDef* onnx_find(std::string_view domain, std::string_view op_type) const;
  std::vector<const OpDef*> all_;
  std::map<std::string_view, const OpDef*> by_name_;
};

/// The registry without extra ops.
const Registry& default_registry();
/// The entry of that name; throws Error if there is none.
const OpDef& find_op(std::string_view name);
const std::vector<const OpDef*>& all_ops();

}  // namespace onnxddp

#include "graph/registry.h"

#include <algorithm>

#include "graph/nearest.h"
#include "graph/ops/families.h"

namespace onnxddp {
namespace {

using Family = std::span<const OpDef> (*)();
constexpr Family kFamilies[] = {elementwise_ops, gemm_ops,  conv_ops, norm_ops,      reduce_ops,
                                layout_ops,      index_ops, loss_ops, optimizer_ops, collective_ops};

}  // namespace

Registry::Registry(std::span<const OpDef> extra) {
  for (Family family : kFamilies)
    for (const OpDef& op : family()) all_.push_back(&op);
  for (const OpDef& op : extra) all_.push_back(&op);
  std::sort(all_.begin(), all_.end(), [](const OpDef* a, const OpDef* b) { return a->name < b->name; });
  for (const OpDef* op : all_) {
    const bool is_new = by_name_.emplace(op->name, op).second;
    if (!is_new) throw Error(cat("op ", op->name, " is registered twice"));
  }
}

const OpDef* Registry::find(std::string_view name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : at->second;
}

const OpDef& Registry::get(std::string_view name) const {
  if (const OpDef* op = find(name)) return *op;
  std::vector<std::string> names;
  for (const OpDef* op : all_) names.push_back(op->name);
  throw Error(cat("there is no op '", name, "'", did_you_mean(name, names)));
}

const OpDef* Registry::onnx_find(std::string_view domain, std::string_view op_type) const {
  const OpDef* op = find(op_type);
  return op != nullptr && op->onnx.since > 0 && op->onnx.domain == domain ? op : nullptr;
}

const Registry& default_registry() {
  static const Registry registry;
  return registry;
}
const OpDef& find_op(std::string_view name) { return default_registry().get(name); }
const std::vector<const OpDef*>& all_ops() { return default_registry().all(); }

}  // namespace onnxddp

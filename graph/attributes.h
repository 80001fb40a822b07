// Attribute access with the entry's defaults, shared by every context that rules and kernels run in.
#pragma once

#include <string>
#include <string_view>

#include "graph/op.h"

namespace ONNXDDP_API onnxddp {

/// The node's attribute, or the entry's default; throws InternalError for a name the entry does not declare.
const Attr& find_attr(const OpDef& op, const Attrs& attrs, std::string_view name);
std::int64_t attr_integer(const OpDef& op, const Attrs& attrs, std::string_view name);
double attr_number(const OpDef& op, const Attrs& attrs, std::string_view name);
std::string attr_text(const OpDef& op, const Attrs& attrs, std::string_view name);
/// Numbers; bound dimensions too.
Ints attr_integers(const OpDef& op, const Attrs& attrs, std::string_view name);
Dims attr_dimensions(const OpDef& op, const Attrs& attrs, std::string_view name);

/// The parsed signature of an entry (cached; thread-safe).
const Signature& signature_of(const OpDef& op);
/// Throws Error unless inputs and attributes fit the entry; returns the attributes in canonical form (numbers
/// of the declared type, defaults dropped).
Attrs check_call(const Graph& graph, const OpDef& op, const std::vector<ValueId>& inputs, Attrs attrs);
/// Types of all outputs by the entry's rule, and known integer contents of the first.
std::vector<TensorType> infer_types(const Graph& graph, const OpDef& op, const std::vector<ValueId>& inputs,
                                    const Attrs& attrs, std::optional<Dims>* ints = nullptr);

}  // namespace onnxddp

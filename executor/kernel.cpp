#include "executor/kernel.h"

#include <algorithm>

#include "graph/op.h"

namespace onnxddp {

Ints SlotType::strides() const {
  const std::size_t rank = shape.size();
  Ints strides(rank, 1);
  if (layout == Layout::nhwc) {
    CHECK(rank == 4, "NHWC of ", shape_str(shape));
    return {shape[1] * shape[2] * shape[3], 1, shape[3] * shape[1], shape[1]};
  }
  for (std::size_t d = rank; d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

namespace {

/// The node's attribute, or the entry's default.
const Attr& attribute(const Node& node, std::string_view name) {
  if (const auto it = node.attrs.find(name); it != node.attrs.end()) return it->second;
  for (const AttrSpec& spec : node.op->attrs) {
    if (spec.name == name && !spec.required) return spec.default_value;
  }
  throw InternalError(cat(node.op->name, " has no attribute '", name, "'"));
}

template <class T>
const T& typed(const Node& node, std::string_view name) {
  const T* value = std::get_if<T>(&attribute(node, name));
  CHECK(value, node.op->name, ": attribute '", name, "' has another type");
  return *value;
}

/// The element type by which a kernel is found: of the first floating input, else of the first input.
DType kernel_dtype(const std::vector<SlotType>& inputs) {
  for (const SlotType& type : inputs) {
    if (is_float(type.dtype)) return type.dtype;
  }
  return inputs.empty() ? DType::f32 : inputs.front().dtype;
}

}  // namespace

std::int64_t PlanContext::integer(std::string_view name) const { return typed<std::int64_t>(node, name); }

double PlanContext::number(std::string_view name) const {
  const Attr& attr = attribute(node, name);
  if (const auto* whole = std::get_if<std::int64_t>(&attr)) return static_cast<double>(*whole);
  return typed<double>(node, name);
}

std::string PlanContext::text(std::string_view name) const { return typed<std::string>(node, name); }

Ints PlanContext::integers(std::string_view name) const {
  const Attr& attr = attribute(node, name);
  if (std::holds_alternative<Dims>(attr)) return static_shape(std::get<Dims>(attr));
  return typed<Ints>(node, name);
}

const Kernel* KernelTable::find(std::string_view op, DType dtype) const {
  const auto [first, last] = kernels.equal_range(op);
  for (auto it = first; it != last; ++it) {
    const std::vector<DType>& dtypes = it->second.dtypes;
    if (dtypes.empty() || std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end()) return &it->second;
  }
  return nullptr;
}

std::vector<HostTensor> evaluate_node(const Graph& graph, NodeId id, const std::vector<HostTensor>& inputs) {
  const Node& node = graph.node(id);
  CHECK(inputs.size() == node.inputs.size(), "one tensor for each input of ", node.op->name);
  std::vector<SlotType> in, out;
  std::vector<const void*> reads;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool given = static_cast<bool>(node.inputs[i]);
    in.push_back(given ? SlotType{inputs[i].dtype(), inputs[i].shape(), Layout::dense}
                       : SlotType{DType::f32, {0}, Layout::dense});
    reads.push_back(given ? inputs[i].raw() : nullptr);
  }
  std::vector<HostTensor> results;
  for (ValueId y : node.outputs) {
    if (!y) {
      out.push_back({DType::f32, {0}, Layout::dense});
      results.emplace_back();
      continue;
    }
    const TensorType& type = graph.value(y).type;
    out.push_back({type.dtype, static_shape(type.shape), Layout::dense});
    results.emplace_back(type.dtype, out.back().shape);
  }
  const DType dtype = kernel_dtype(in);
  const Kernel* kernel = cpu_kernels().find(node.op->name, dtype);
  if (!kernel)
    throw Error(cat("the CPU has no kernel for ", node.op->name, " of ", dtype_name(dtype))).in(node.origin);

  PlanContext context(graph, node, std::move(in), std::move(out), 1);
  const Run run = kernel->prepare(context);
  std::vector<void*> writes;
  for (std::size_t i = 0; i < results.size(); ++i)
    writes.push_back(node.outputs[i] ? results[i].mutable_raw() : nullptr);
  const HostTensor scratch(DType::u8, {static_cast<std::int64_t>(context.scratch_bytes)});
  run({reads.data(), writes.data(), const_cast<std::byte*>(scratch.raw()), nullptr});
  return results;
}

std::vector<HostTensor> evaluate_constant(const Graph& graph, NodeId id) {
  std::vector<HostTensor> inputs;
  for (ValueId x : graph.node(id).inputs) {
    if (!x) {
      inputs.emplace_back();
      continue;
    }
    const Value& value = graph.value(x);
    CHECK(value.data.has_value(), "input '", value.name, "' of ", graph.node(id).op->name,
          " has no contents");
    inputs.push_back(*value.data);
  }
  return evaluate_node(graph, id, inputs);
}

}  // namespace onnxddp

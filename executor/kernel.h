// Kernel = prepare + run. `prepare` sees bound shapes once and returns `run`, which does no allocation,
// look-up or lock.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/op.h"

namespace ONNXDDP_API onnxddp {

class Communicator;

/// Memory order of a rank-4 tensor. The logical shape is always ONNX's N,C,H,W.
enum class Layout : std::uint8_t { dense, nhwc };

struct SlotType {
  DType dtype = DType::f32;
  Ints shape;  // logical
  Layout layout = Layout::dense;
  std::int64_t numel() const { return onnxddp::numel(shape); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * dtype_size(dtype); }
  /// Element strides of the logical axes.
  Ints strides() const;
};

/// What `prepare` sees: the node with bound attributes, the types and layouts of its operands.
class PlanContext {
 public:
  PlanContext(const Graph& g, const Node& n, std::vector<SlotType> in, std::vector<SlotType> out,
              int thread_count)
      : graph(g), node(n), inputs(std::move(in)), outputs(std::move(out)), threads(thread_count) {}
  const Graph& graph;
  const Node& node;
  std::vector<SlotType> inputs;  // absent optional inputs have an empty dtype-f32 shape {0}; ask has()
  std::vector<SlotType> outputs;
  int threads;
  std::size_t scratch_bytes = 0;  // set by prepare: temporary memory during run

  bool has(std::size_t i) const { return i < node.inputs.size() && node.inputs[i]; }
  bool has_output(std::size_t i) const { return i < node.outputs.size() && node.outputs[i]; }
  std::int64_t integer(std::string_view name) const;  // attribute or the entry's default
  double number(std::string_view name) const;
  bool flag(std::string_view name) const { return integer(name) != 0; }
  std::string text(std::string_view name) const;
  Ints integers(std::string_view name) const;  // also bound dims
};

/// What `run` gets: one pointer per operand of the node (null: absent), scratch.
struct RunContext {
  const void* const* inputs;
  void* const* outputs;
  void* scratch;
  Communicator* communicator;  // for collectives
  template <class T>
  const T* in(std::size_t i) const {
    return static_cast<const T*>(inputs[i]);
  }
  template <class T>
  T* out(std::size_t i) const {
    return static_cast<T*>(outputs[i]);
  }
};
using Run = std::function<void(const RunContext&)>;

/// Which layouts a kernel takes. dense: everything dense. follow: the outputs of rank 4 take the layout of
/// the first rank-4 input of the same shape; all inputs of that shape are brought to it; others stay dense
/// (broadcast operands are read through strides). choose: `layouts` decides.
enum class LayoutRule : std::uint8_t { dense, follow, choose };

struct LayoutChoice {
  std::vector<Layout> inputs, outputs;
};

struct Kernel {
  std::string op;
  std::vector<DType> dtypes;  // of the first floating operand (or the first operand); empty: any
  LayoutRule rule = LayoutRule::dense;
  std::function<Run(PlanContext&)> prepare;
  /// For rule `choose`: given logical types and the layouts in which the inputs are available, what the
  /// kernel wants.
  std::function<LayoutChoice(const PlanContext&)> layouts = nullptr;
};

/// Kernels of a device by op; several entries per op differ in dtypes (first match wins).
struct KernelTable {
  std::multimap<std::string, Kernel, std::less<>> kernels;
  /// The kernel for op and dtype, or null.
  const Kernel* find(std::string_view op, DType dtype) const;
};

/// The CPU's table.
const KernelTable& cpu_kernels();

/// Runs one node whose inputs are constants, on the CPU: the evaluator of `simplify`, ops_test, predict of
/// tiny graphs.
std::vector<HostTensor> evaluate_node(const Graph& graph, NodeId node, const std::vector<HostTensor>& inputs);
/// As an Evaluator over constants of the graph.
std::vector<HostTensor> evaluate_constant(const Graph& graph, NodeId node);

}  // namespace onnxddp

// A device whose kernels do nothing, for tests of plans as text: every op, with the layout rules of a usual
// CPU.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "executor/plan/plan.h"
#include "graph/pass.h"
#include "graph/registry.h"
#include "graph/text.h"

namespace onnxddp::testing {

/// Convolutions compute in N,H,W,C; pools in what they get; activations and sums follow; the rest is dense.
class PaperDevice : public Device {
 public:
  PaperDevice() {
    for (const OpDef* op : all_ops()) add(op->name);
    add("Reorder");
    table_.kernels.erase("Erf");
  }
  std::string name() const override { return "paper"; }
  std::string kind() const override { return "paper"; }
  void* allocate(std::size_t) override { return nullptr; }
  void free(void*) override {}
  void upload(void*, const void*, std::size_t) override {}
  void download(void*, const void*, std::size_t) override {}
  const KernelTable& kernels() const override { return table_; }
  int threads() const override { return 1; }
  /// Scratch that every kernel of this op asks for.
  std::map<std::string, std::size_t> scratch;

 private:
  static LayoutChoice all(const PlanContext& c, Layout layout) {
    LayoutChoice choice;
    for (const SlotType& x : c.inputs) choice.inputs.push_back(x.shape.size() == 4 ? layout : Layout::dense);
    for (const SlotType& y : c.outputs)
      choice.outputs.push_back(y.shape.size() == 4 ? layout : Layout::dense);
    return choice;
  }

  void add(const std::string& op) {
    static const std::set<std::string> following = {"Relu", "Add", "Mul", "Step", "Copy"};
    static const std::set<std::string> pools = {"MaxPool", "MaxPoolGrad", "BatchNormApply"};
    Kernel kernel{op, {}, following.count(op) ? LayoutRule::follow : LayoutRule::dense, nullptr};
    kernel.prepare = [this, op](PlanContext& c) {
      if (const auto it = scratch.find(op); it != scratch.end()) c.scratch_bytes = it->second;
      return Run([](const RunContext&) {});
    };
    if (op.rfind("Conv", 0) == 0) {
      kernel.rule = LayoutRule::choose;
      kernel.layouts = [op](const PlanContext& c) {
        LayoutChoice choice = all(c, Layout::nhwc);
        if (op == "ConvWeightGrad") choice.outputs[0] = Layout::dense;  // weights stay dense
        if (op != "ConvWeightGrad") choice.inputs[1] = Layout::dense;
        return choice;
      };
    } else if (pools.count(op)) {
      kernel.rule = LayoutRule::choose;
      kernel.layouts = [](const PlanContext& c) { return all(c, c.inputs[0].layout); };
    }
    table_.kernels.emplace(op, std::move(kernel));
  }

  KernelTable table_;
};

/// The checked plan of a graph's text.
inline Plan plan_of(std::string_view text, const DimBindings& dims = {},
                    const Device& device = PaperDevice()) {
  Graph graph = parse(text);
  bind_dims(graph, dims);
  StateLayout state;
  Plan plan = make_plan(graph, device, state);
  plan.dims = dims;
  plan_check(plan);
  return plan;
}

}  // namespace onnxddp::testing

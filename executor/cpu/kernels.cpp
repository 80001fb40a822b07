// The CPU's table.
#include "executor/cpu/kernels.h"

#include <algorithm>

namespace onnxddp {

const KernelTable& cpu_kernels() {
  static const KernelTable table = [] {
    KernelTable t;
    cpu::add_elementwise(t);
    cpu::add_reductions(t);
    cpu::add_losses(t);
    cpu::add_norms(t);
    cpu::add_pools(t);
    cpu::add_layouts(t);
    cpu::add_indexing(t);
    cpu::add_optimizers(t);
    cpu::add_collectives(t);
    cpu::add_products(t);
    cpu::add_convolutions(t);
    return t;
  }();
  return table;
}

namespace cpu {

LayoutChoice same_layout(const PlanContext& c) {
  const Ints& shape = c.inputs[0].shape;
  const auto is_image = [&](const SlotType& t) { return t.shape.size() == 4 && t.shape == shape; };
  const bool nhwc = std::any_of(c.inputs.begin(), c.inputs.end(),
                                [&](const SlotType& t) { return is_image(t) && t.layout == Layout::nhwc; });
  const auto choose = [&](const std::vector<SlotType>& types) {
    std::vector<Layout> layouts;
    for (const SlotType& t : types) layouts.push_back(nhwc && is_image(t) ? Layout::nhwc : Layout::dense);
    return layouts;
  };
  return {choose(c.inputs), choose(c.outputs)};
}

}  // namespace cpu
}  // namespace onnxddp

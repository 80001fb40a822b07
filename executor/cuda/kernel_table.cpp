#include "executor/cuda/kernel_table.h"

#include "executor/cuda/status.h"
#include "executor/cuda/table_parts.h"

namespace onnxddp::cuda {

void add(KernelTable& table, const std::string& op, const std::vector<DType>& dtypes,
         std::function<Run(PlanContext&)> prepare) {
  const auto model = cpu_kernels().kernels.find(op);
  CHECK(model != cpu_kernels().kernels.end(), "the CPU has no kernel for ", op);
  table.kernels.emplace(op,
                        Kernel{op, dtypes, model->second.rule, std::move(prepare), model->second.layouts});
}

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (to == from || bytes == 0) return;
  CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()));
}

const KernelTable& cuda_kernels() {
  static const KernelTable table = [] {
    KernelTable t;
    add_elementwise(t);
    add_reductions(t);
    add_losses(t);
    add_norms(t);
    add_pools(t);
    add_layouts(t);
    add_indexing(t);
    add_updates(t);
    add_collectives(t);
    add_products(t);
    add_convolutions(t);
    return t;
  }();
  return table;
}

}  // namespace onnxddp::cuda

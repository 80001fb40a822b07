// onnx-ddp ops
#include <cstdio>

#include "executor/cli/command_line.h"
#include "executor/cli/commands.h"
#include "executor/kernel.h"
#include "graph/registry.h"

namespace onnxddp {
namespace {

const char* gradient_text(const OpDef& op) {
  switch (gradient_kind(op)) {
    case GradientKind::rule: return "yes";
    case GradientKind::zero: return "zero";
    case GradientKind::decomposition: return "composed";
    case GradientKind::none: return "-";
  }
  return "-";
}

std::string devices_text(const OpDef& op) {
  if (cpu_kernels().find(op.name, DType::f32) != nullptr) return "cpu";
  for (const DType dtype : {DType::i64, DType::boolean})
    if (cpu_kernels().find(op.name, dtype) != nullptr) return "cpu";
  return op.decompose ? "composed" : "-";
}

}  // namespace

int run_ops(CommandLine&) {
  std::printf("%-24s %-16s %-10s %s\n", "op", "ONNX", "gradient", "devices");
  for (const OpDef* op : all_ops()) {
    const std::string since = op->onnx.since == 0 ? "internal"
                                                  : cat(op->onnx.domain.empty() ? "" : op->onnx.domain + " ",
                                                        "from opset ", op->onnx.since);
    std::printf("%-24s %-16s %-10s %s\n", op->name.c_str(), since.c_str(), gradient_text(*op),
                devices_text(*op).c_str());
  }
  std::printf(
      "\nONNX functions (such as Softplus or HardSwish) and a model's own are inlined where their bodies use "
      "these ops.\n");
  return kExitDone;
}

}  // namespace onnxddp

// What ranks do together. Every rank issues the same collectives in the same order.
#include "graph/ops/families.h"
#include "graph/ops/rules.h"

namespace onnxddp {
namespace {

void all_reduce_infer(Inference& i) {
  i.require(i.text("op") == "sum", "unknown reduction '", i.text("op"), "'");
  for (std::size_t k = 0; k < i.count(); ++k) {
    i.require(i.x(k).dtype == i.x(0).dtype, "the element types differ");
    i.y(i.x(k));
  }
}

void all_gather_infer(Inference& i) {
  i.require(i.integer("ranks") >= 1, "ranks must be positive");
  i.y({i.x(0).dtype, {i.integer("ranks"), numel(i.shape(0))}});
}

}  // namespace

// clang-format off
std::span<const OpDef> collective_ops() {
  static const std::vector<OpDef> ops = {
  {.name = "AllReduce",
   .signature = "(xs...: number) -> ys...",
   .attrs = {{"op", std::string("sum")}},
   .traits = {.lane = Lane::comm, .collective = true},  // the planner lays operands and results into one bucket
   .onnx = {},
   .infer = all_reduce_infer,
   .gradient = not_differentiable,
   .samples = {"AllReduce(f32[3], f32[2,2])"}},

  {.name = "AllGather",  // row r is rank r's operand
   .signature = "(x: number) -> all",
   .attrs = {{"ranks", 1, true}},
   .traits = {.lane = Lane::comm, .collective = true},
   .onnx = {},
   .infer = all_gather_infer,
   .gradient = not_differentiable,
   .samples = {"AllGather(f32[2,3]) {ranks=1}"}},
  };
  return ops;
}
// clang-format on

}  // namespace onnxddp

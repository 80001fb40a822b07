#include "executor/train/programs.h"

#include <algorithm>

#include "executor/kernel.h"

namespace onnxddp {
namespace {

/// Everything up to the gradients; shared by the step and micro programs.
void add_front(Pipeline& pipeline, const ProgramOptions& options, LossInfo* info) {
  const Evaluator evaluate = evaluate_constant;
  pipeline.add("import", [](Graph&) {});
  pipeline.add("canonicalise", [evaluate](Graph& g) {
    canonicalise(g);
    simplify(g, evaluate);
  });
  pipeline.add("loss", [&options, info](Graph& g) {
    const LossInfo made = attach_loss(g, options.loss, options.loss_options, options.loss_input,
                                      options.target_name, options.target_type);
    if (info != nullptr) *info = made;
  });
  pipeline.add("cast_precision", [](Graph&) {});  // fp32: nothing to cast
  pipeline.add("autodiff", [](Graph& g) { autodiff(g); });
  pipeline.add("simplify", [evaluate](Graph& g) { simplify(g, evaluate); });
}

void add_back(Pipeline& pipeline, const ProgramOptions& options) {
  const Evaluator evaluate = evaluate_constant;
  pipeline.add("accumulate", [&options](Graph& g) {
    if (options.accumulate > 1) accumulate_step(g);
  });
  pipeline.add("distribute", [&options](Graph& g) { distribute(g, options.distribute); });
  pipeline.add("guard", [&options](Graph& g) { guard(g, options.guard); });
  pipeline.add("optimizer", [&options](Graph& g) { attach_optimizer(g, options.optimizer); });
  pipeline.add("fuse", [](Graph& g) { fuse(g); });
  pipeline.add("simplify", [evaluate](Graph& g) { simplify(g, evaluate); });
}

Graph micro_graph(const ImportedModel& model, const ProgramOptions& options) {
  Graph graph = model.graph;
  graph.name = "micro";
  Pipeline pipeline;
  add_front(pipeline, options, nullptr);
  pipeline.add("accumulate", [](Graph& g) { accumulate_micro(g); });
  pipeline.add("distribute", [&options](Graph& g) {
    DistributeOptions local = options.distribute;
    local.reduce_gradients = false;
    distribute(g, local);
  });
  const Evaluator evaluate = evaluate_constant;
  pipeline.add("simplify", [evaluate](Graph& g) { simplify(g, evaluate); });
  pipeline.run(graph);
  return graph;
}

}  // namespace

std::vector<std::string> pipeline_stages() {
  const ProgramOptions options;
  Pipeline pipeline;
  add_front(pipeline, options, nullptr);
  add_back(pipeline, options);
  return pipeline.stages();
}

/// Master weights are float32 or float64; half precision would lose the updates.
static void check_precision(const Graph& graph) {
  for (const ValueId id : graph.params) {
    const Value& value = graph.value(id);
    if (value.kind != Kind::param || value.type.dtype == DType::f32 || value.type.dtype == DType::f64)
      continue;
    throw Error(
        cat("parameter '", value.name, "' cannot train as ", value.type.str(), ": only f32 and f64 do"))
        .hint(cat("export the model in float32, or leave it as it is with --freeze '", value.name, "'"));
  }
}

Graph training_graph(const ImportedModel& model, const ProgramOptions& options, std::string_view stop,
                     LossInfo* info) {
  check_precision(model.graph);
  Graph graph = model.graph;
  Pipeline pipeline;
  add_front(pipeline, options, info);
  add_back(pipeline, options);
  pipeline.run(graph, stop);
  return graph;
}

Programs build_programs(const ImportedModel& model, const ImportedModel& eval_model,
                        const ProgramOptions& options) {
  Programs out;
  out.step = training_graph(model, options, {}, &out.loss);
  for (ValueId id : model.graph.params) {
    const Value& value = model.graph.value(id);
    if (value.kind != Kind::param) continue;
    const ValueId trained = out.step.find(value.name);
    (trained && out.step.update_of(trained) ? out.trained : out.unused).push_back(value.name);
  }
  if (out.trained.empty())
    throw Error("no parameter of the model is on a path to the loss, so there is nothing to train")
        .hint(
            "`onnx-ddp check MODEL` lists every tensor and its role; --train REGEX adds parameters, --freeze "
            "REGEX takes "
            "them away (whole names: 'conv.*')");
  if (options.accumulate > 1) out.micro = micro_graph(model, options);
  out.evaluate = inference_graph(eval_model);
  attach_loss(out.evaluate, options.loss, options.loss_options, options.loss_input, options.target_name,
              options.target_type);
  simplify(out.evaluate, evaluate_constant);
  verify(out.evaluate);
  out.evaluate.name = "evaluate";
  return out;
}

Graph inference_graph(const ImportedModel& eval_model) {
  Graph graph = eval_model.graph;
  canonicalise(graph);
  simplify(graph, evaluate_constant);
  verify(graph);
  return graph;
}

}  // namespace onnxddp

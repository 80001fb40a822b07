// The programs of a run, made by the pipeline from one imported model.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "distributed/distribute.h"
#include "graph/pass.h"
#include "graph/passes/passes.h"
#include "importer/importer.h"

namespace ONNXDDP_API onnxddp {

struct ProgramOptions {
  std::string loss;  // "": default_loss
  OptionMap loss_options;
  std::string loss_input;  // "": the first output
  std::string target_name = "target";
  TensorType target_type;  // of the target input, first dimension the batch symbol
  bool target_is_binary = false, target_is_one_hot = false;
  int accumulate = 1;
  DistributeOptions distribute;
  GuardOptions guard;
  OptimizerSpec optimizer;
};

struct Programs {
  Graph step{"step"};          // one optimizer step (with accumulation: its last micro-batch)
  std::optional<Graph> micro;  // the earlier micro-batches, when accumulate > 1
  Graph evaluate{"evaluate"};  // outputs loss.sum, loss.count?, correct?; inference form, no collectives
  LossInfo loss;
  std::vector<std::string> unused;   // params that the loss does not reach
  std::vector<std::string> trained;  // params with a gradient
};

/// The training pipeline up to and including stage `stop` ("" : all graph stages), for `show --stage`.
/// Stages: import canonicalise loss cast_precision autodiff simplify accumulate distribute guard optimizer
/// fuse.
Graph training_graph(const ImportedModel& model, const ProgramOptions& options, std::string_view stop = {},
                     LossInfo* info = nullptr);
std::vector<std::string> pipeline_stages();

/// All programs. `eval_model`: the same file imported with training=false.
Programs build_programs(const ImportedModel& model, const ImportedModel& eval_model,
                        const ProgramOptions& options);

/// Inference program: the model's own outputs.
Graph inference_graph(const ImportedModel& eval_model);

}  // namespace onnxddp

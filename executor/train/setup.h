// What a command derives from the options before the first step: model, programs, data, batch size.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distributed/sampler.h"
#include "executor/train/data.h"
#include "executor/train/options.h"
#include "executor/train/programs.h"
#include "importer/importer.h"

namespace ONNXDDP_API onnxddp {

/// Throws Error for a parameter that holds NaN or infinity: training from it has not diverged, the model was
/// broken before.
void check_weights(const ImportedModel& model, const std::string& file);

/// Import options of --train, --freeze, --bn, --dim, --input. `training`: false for eval and predict.
ImportOptions import_options(const Options& options, bool training);
/// Loss, optimizer, guard and distribution for `ranks` ranks; the target is still to be filled in.
ProgramOptions program_options(const Options& options, int ranks);
/// Whether the first dimension of inputs is the batch's symbol; the fixed number if not.
std::optional<std::int64_t> fixed_batch(const ImportedModel& model);

/// Elements of the model's weights (parameters, buffers, frozen tensors; no integers, no constants), and
/// those that train: parameters but for `unused`.
struct ValueCounts {
  std::int64_t trained = 0, all = 0;
};
ValueCounts count_values(const ImportedModel& model, const std::vector<std::string>& unused);

/// Matches data and model and settles loss and target: fills those fields of `program` and adds to `notes`
/// and `warnings`.
struct Target {
  std::optional<Column> column;
  DimBindings dims;  // of symbols other than the batch's
  std::vector<Column> inputs;
};
Target settle_target(const ImportedModel& model, const Dataset& data, const Options& options,
                     const std::string& where, ProgramOptions& program, std::vector<std::string>& notes);
/// The same without data (check and show): targets as the loss, or the default loss for the output, wants
/// them.
void assume_target(const ImportedModel& model, const Options& options, ProgramOptions& program,
                   std::vector<std::string>& notes);

/// A training run, ready but for devices and ranks.
struct TrainSetup {
  Options options;  // effective: data, target, loss, lr, batch size, epochs or steps are set
  ImportedModel model, eval_model;
  ProgramOptions program_options;
  Programs programs;
  DimBindings dims;  // symbols other than the batch's
  std::unique_ptr<BatchSource> data, eval_data;
  std::unique_ptr<Sampler> sampler;
  std::int64_t steps_per_epoch = 0, total_steps = 0;
  std::vector<std::string> notes, warnings;
  std::string data_text;  // for the banner
};
/// Throws Error for everything that can be seen before the first step.
TrainSetup prepare_training(const Options& options, int rank, int ranks);

/// The evaluation of a model file: the graph with outputs loss.sum, loss.count?, correct?.
struct EvalSetup {
  ImportedModel model;
  Graph evaluate{"evaluate"};
  LossInfo loss;
  DimBindings dims;
  std::unique_ptr<BatchSource> data;
  std::int64_t batch_size = 0;
  std::vector<std::string> notes;
};
EvalSetup prepare_evaluation(const Options& options);

/// Kept targets in a batch of `rows`, where the loss knows that beforehand.
double static_count(const LossInfo& loss, const std::string& batch_symbol, DimBindings dims,
                    std::int64_t rows);

}  // namespace onnxddp

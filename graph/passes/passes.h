// The passes of the pipeline, in the order of `show --stage`. Each is Graph& -> void.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/pass.h"

namespace ONNXDDP_API onnxddp {

/// Expands ops whose gradient is from_decomposition, replaces values of known integer contents by constants,
/// drops dead nodes.
void canonicalise(Graph& graph);

/// Folds constants (by `evaluate` when given), removes identities and dead nodes, merges equal nodes. Never
/// moves or merges collectives or random ops.
void simplify(Graph& graph, const Evaluator& evaluate = nullptr);

/// Removes nodes, constants, inputs (never: inputs stay) that no output or update needs. Collectives stay if
/// used.
void remove_dead(Graph& graph);

/// Options of a loss, `--loss NAME:k=v`.
using OptionMap = std::map<std::string, std::string, std::less<>>;

/// What attach_loss did.
struct LossInfo {
  std::string name;                // the loss's name
  std::string input;               // the value that the loss reads
  std::string target;              // the name of the target input it added ("" for graph)
  std::vector<std::string> notes;  // things to say in the banner ("a final Softmax is skipped")
  bool exact = true;               // false: a graph loss that is a rank mean
  bool static_count = true;        // whether `count` is known from the batch size alone
  Dim count;                       // denominators of this rank's micro-batch, if static_count
};
/// Adds the loss on value `input` ("" : the first output): an input for the target of `target_type` (its
/// symbols are the graph's), `loss.sum` (sum over elements, no division), `loss.count` (when it is not
/// static: a scalar of the model's dtype counting kept targets), state scalar `loss.denominator` (written by
/// the trainer: the global denominator D of the optimizer step), `loss = loss.sum / loss.denominator`: this
/// rank's share of the global mean. Outputs become: loss, loss.sum (and loss.count), then `correct` (number
/// of right classes) where the loss is a classification. The model's own outputs stay only if `keep_outputs`.
LossInfo attach_loss(Graph& graph, const std::string& loss, const OptionMap& options,
                     const std::string& input, const std::string& target_name, const TensorType& target_type,
                     bool keep_outputs = false);

/// The default loss for an output and target (design A1); throws Error naming --loss where it belongs to a
/// later recipe. Without any target: pass TensorType{DType::boolean, {}}.
std::string default_loss(const Graph& graph, const std::string& input, const TensorType& target,
                         bool target_is_binary, bool target_is_one_hot, std::vector<std::string>* notes);

/// Gradients travel between passes as graph outputs named `P.grad`, so that every stage is complete as text.
/// This reads them: param -> gradient, in the order of production.
std::vector<std::pair<ValueId, ValueId>> gradients(const Graph& graph);
/// Replaces the gradient of `param`.
void set_gradient(Graph& graph, ValueId param, ValueId gradient);

/// Appends the backward graph of output `loss`: for every Kind::param on a path an output `P.grad`. Params
/// that the loss does not reach get none. Throws Error naming the params that are reachable only through an
/// op without a gradient.
void autodiff(Graph& graph, const std::string& loss = "loss");

/// Micro-batch accumulation with states `P.acc`. `accumulate_micro` makes the program of all micro-batches
/// but the last: `P.acc <- P.acc + P.grad`, no gradients left; `accumulate_step` the last one: adds `P.acc`
/// to each gradient and resets it. Output `loss` is accumulated likewise (state `loss.acc`).
void accumulate_micro(Graph& graph);
void accumulate_step(Graph& graph);

struct GuardOptions {
  double clip_norm = 0;   // 0: none
  double clip_value = 0;  // 0: none
};
/// Adds output `grad_norm` (global 2-norm before clipping, formula of torch.nn.utils.clip_grad_norm_: factor
/// min(1, max/(norm+1e-6))) and clips.
void guard(Graph& graph, const GuardOptions& options);

/// `name:key=value,…` of --optimizer, resolved against the definition's defaults.
struct OptimizerSpec {
  std::string name = "adam";
  OptionMap options;
};
/// Columns of the hyper-parameter table of one parameter group, in order: "lr", "step", then the options.
std::vector<std::string> hyper_columns(const OptimizerSpec& spec);
/// Values of the option columns (lr and step are the trainer's), resolved; throws usage Error for unknown
/// keys or bad values.
std::vector<double> hyper_defaults(const OptimizerSpec& spec);
double default_lr(const OptimizerSpec& spec);
/// Adds the updates of every parameter: state `optimizer.group0: f64[columns]` (written by the trainer before
/// each step; step counts from 1), optimizer state `p.velocity`, `p.exp_avg`, …, and `update`s. Removes the
/// gradient outputs.
void attach_optimizer(Graph& graph, const OptimizerSpec& spec);

/// Peephole fusions; each must equal its composition.
void fuse(Graph& graph);

/// A learning-rate schedule, `--schedule NAME:k=v`; closed forms of ddp.md 3.2.
struct ScheduleSpec {
  std::string name = "constant";
  OptionMap options;
};
/// Learning rate at 0-based optimizer step `step` of 0-based epoch `epoch`; warm-up: step s < n uses
/// lr*(s+1)/n and the schedule counts from the end of warm-up. `steps_per_epoch` for unit=epoch.
double schedule_lr(const ScheduleSpec& spec, double lr, std::int64_t step, std::int64_t steps_per_epoch,
                   std::int64_t total_steps, std::int64_t warmup_steps);
/// Throws usage Error on unknown names, keys or bad values.
void check_schedule(const ScheduleSpec& spec);

/// Names with one-line help, for --help and errors.
std::vector<std::pair<std::string, std::string>> loss_names();
std::vector<std::pair<std::string, std::string>> optimizer_names();
std::vector<std::pair<std::string, std::string>> schedule_names();

}  // namespace onnxddp

// Options: what a user can set, as a plain struct with the defaults. The single truth: the option table of
// the command line points at these fields, and the trainer reads them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/passes/passes.h"

namespace ONNXDDP_API onnxddp {

/// Fields are in the order of design A1; an absent optional means "decided from model, data or machine" (see
/// the comment).
struct Options {
  std::string model;              // MODEL.onnx, a RUN_DIR or a checkpoint
  std::vector<std::string> data;  // files; none: the model's neighbour STEM.npz
  std::string target;             // array; "": the one that is no input
  std::vector<std::string> eval_data;
  double eval_fraction = 0;           // of the rows of `data`, held out
  std::string loss;                   // NAME[:k=v,…]; "": by output and target
  std::string loss_input;             // tensor; "": the first output
  std::vector<std::string> input;     // NAME=VALUE, inputs that are no data
  std::vector<std::string> dim;       // NAME=VALUE
  std::string optimizer = "adam";     // NAME[:k=v,…]
  std::optional<double> lr;           // the optimizer's
  std::string schedule = "constant";  // NAME[:k=v,…]
  std::int64_t warmup_steps = 0;
  double clip_norm = 0;   // 0: none
  double clip_value = 0;  // 0: none
  std::int64_t accumulate = 1;
  std::optional<std::int64_t> epochs;      // 10, unless steps is set
  std::optional<std::int64_t> steps;       // optimizer steps
  std::optional<std::int64_t> batch_size;  // per rank; min(32, a rank's share)
  std::int64_t seed = 0;
  bool no_shuffle = false;
  bool drop_last = false;
  bool drop_short_batch = false;
  std::string sampler = "torch";
  std::string train;   // pattern of tensor names
  std::string freeze;  // pattern of tensor names
  std::string bn = "train";
  bool sync_bn = false;
  std::string bn_running_var = "torch";
  std::string nproc_per_node = "1";  // number or "auto": one per core
  std::string log_dir;
  std::string device = "auto";
  std::optional<std::int64_t> threads;  // per rank; cores / ranks
  std::string precision = "fp32";
  std::string out;                     // runs/STEM-N
  std::string save_every = "1epochs";  // N, Nsteps, Nepochs
  std::int64_t keep = 3;
  std::string resume;  // "", "auto", a RUN_DIR or a checkpoint
  std::string on_nan = "stop";
  double bucket_mb = 0;  // 0: the policy's
  std::string bucket_policy = "planned";
  std::string loss_denominator = "global";
  double collective_timeout = 120;  // seconds
  std::int64_t log_every = 1;       // optimizer steps
  bool quiet = false;

  // Of single commands.
  std::int64_t warmup = 5;       // bench
  std::string stage = "import";  // show
  std::int64_t ranks = 1;        // show
  std::string format = "text";   // show
  std::string output;            // export, predict, show
  bool json = false;             // check
};

/// `NAME[:k=v,…]` of --loss, --optimizer and --schedule.
struct Spec {
  std::string name;
  OptionMap options;
};
/// Throws a usage Error naming the flag for anything of another form.
Spec parse_spec(const std::string& flag, const std::string& text);
/// `NAME=VALUE`; throws a usage Error naming the flag for anything else.
std::pair<std::string, std::string> parse_assignment(const std::string& flag, const std::string& text);

/// --save-every: every `steps` optimizer steps or every `epochs` epochs (one of them is 0).
struct SaveEvery {
  std::int64_t steps = 0, epochs = 0;
};
SaveEvery parse_save_every(const std::string& text);

/// A number of --nproc-per-node.
int rank_count(const Options& options);

/// Throws a usage Error for what can be seen to be wrong before any file is read: unknown losses, optimizers,
/// schedules and their keys, malformed assignments.
void check_options(const Options& options);

}  // namespace onnxddp

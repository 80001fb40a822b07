#include "executor/cli/option_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "executor/cli/config.h"
#include "graph/nearest.h"

namespace onnxddp {
namespace {

constexpr unsigned kData = kTrain | kEval | kPredict | kCheck | kShow | kBench;  // commands that look at data
constexpr unsigned kGraph = kTrain | kCheck | kShow | kBench;  // commands that make the training graph
constexpr unsigned kRun = kTrain | kEval | kPredict | kBench;  // commands that run something
constexpr unsigned kRanks =
    kTrain | kEval | kBench | kCheck;  // commands that start ranks (check: tells what they need)

using O = Options;

std::vector<OptionDef> make_table() {
  // One line an option.
  // clang-format off
  std::vector<OptionDef> t = {
      {.name = "data", .value = "FILE...", .help = "npz or npy files; arrays are matched to the model's inputs by name (default: MODEL's neighbour STEM.npz)", .commands = kData, .field = &O::data, .semantic = false},
      {.name = "target", .value = "NAME", .help = "the array that is the target (default: the one that is no input)", .commands = kData, .field = &O::target},
      {.name = "eval-data", .value = "FILE...", .help = "data to evaluate on after every epoch", .commands = kTrain, .field = &O::eval_data, .rival = "eval-fraction", .semantic = false},
      {.name = "eval-fraction", .value = "F", .help = "share of the data that is held out for evaluation", .commands = kTrain, .field = &O::eval_fraction, .least = 0, .rival = "eval-data"},
      {.name = "loss", .value = "NAME[:k=v,..]", .help = "mse; cross_entropy (axis, ignore_index); graph (default: by output and target)", .commands = kGraph | kEval, .field = &O::loss},
      {.name = "loss-input", .value = "TENSOR", .help = "the tensor that the loss reads (default: the first output)", .commands = kGraph | kEval, .field = &O::loss_input},
      {.name = "input", .value = "NAME=VALUE...", .help = "inputs that are not data", .commands = kData | kExport, .field = &O::input},
      {.name = "dim", .value = "NAME=VALUE...", .help = "sizes of symbolic dimensions", .commands = kData, .field = &O::dim},
      {.name = "optimizer", .value = "NAME[:k=v,..]", .help = "sgd (momentum, dampening, weight_decay, nesterov), adam and adamw (beta1, beta2, eps, weight_decay, amsgrad)", .commands = kGraph, .field = &O::optimizer},
      {.name = "lr", .aliases = {"learning-rate"}, .value = "X", .help = "learning rate (default: the optimizer's, 0.001)", .commands = kGraph, .field = &O::lr, .least = 0},
      {.name = "schedule", .value = "NAME[:k=v,..]", .help = "constant; step:step_size=N,gamma=0.1; cosine:t_max=N,eta_min=0. Counted in optimizer steps; unit=epoch counts epochs", .commands = kTrain | kBench, .field = &O::schedule},
      {.name = "warmup-steps", .value = "N", .help = "optimizer steps of linear warm-up", .commands = kTrain | kBench, .field = &O::warmup_steps, .least = 0},
      {.name = "clip-norm", .value = "X", .help = "largest norm of all gradients together (0: no clipping)", .commands = kGraph, .field = &O::clip_norm, .least = 0},
      {.name = "clip-value", .value = "X", .help = "largest absolute value of a gradient (0: no clipping)", .commands = kGraph, .field = &O::clip_value, .least = 0},
      {.name = "accumulate", .value = "K", .help = "micro-batches an optimizer step", .commands = kGraph, .field = &O::accumulate, .least = 1},
      {.name = "epochs", .value = "N", .help = "passes over the data (default: 10)", .commands = kTrain, .field = &O::epochs, .least = 1, .rival = "steps", .semantic = true},
      {.name = "steps", .value = "N", .help = "optimizer steps, instead of epochs; bench: steps to time (default: 100)", .commands = kTrain | kBench, .field = &O::steps, .least = 1, .rival = "epochs"},
      {.name = "batch-size", .value = "B", .help = "rows a rank and micro-batch (default: 32, or a rank's share if that is smaller)", .commands = kData, .field = &O::batch_size, .least = 1},
      {.name = "seed", .value = "S", .help = "of the order of rows and of dropout", .commands = kTrain | kBench, .field = &O::seed, .least = 0},
      {.name = "no-shuffle", .help = "keep the order of the rows", .commands = kTrain | kBench, .field = &O::no_shuffle},
      {.name = "drop-last", .help = "leave rows out instead of repeating some when ranks get unequal shares", .commands = kTrain | kBench, .field = &O::drop_last},
      {.name = "drop-short-batch", .help = "leave out the last batch of an epoch if it is short", .commands = kTrain | kBench, .field = &O::drop_short_batch},
      {.name = "sampler", .value = "NAME", .help = "which rows a rank reads; torch: as DistributedSampler and DataLoader", .commands = kTrain | kBench, .field = &O::sampler, .choices = {"torch"}, .later = {"exact"}},
      {.name = "train", .value = "REGEX", .help = "names of tensors that are trained although the default says no", .commands = kGraph, .field = &O::train},
      {.name = "freeze", .value = "REGEX", .help = "names of tensors that are not trained", .commands = kGraph, .field = &O::freeze},
      {.name = "bn", .value = "MODE", .help = "batch norm: train (batch statistics), eval (running statistics), as-file", .commands = kGraph, .field = &O::bn, .choices = {"train", "eval", "as-file"}},
      {.name = "sync-bn", .help = "batch norm statistics of all ranks together", .commands = kGraph, .field = &O::sync_bn},
      {.name = "bn-running-var", .value = "KIND", .help = "running variance: torch (unbiased) or onnx (population)", .commands = kGraph, .field = &O::bn_running_var, .choices = {"torch", "onnx"}},
      {.name = "nproc-per-node", .value = "N|auto", .help = "ranks to start on this machine", .commands = kRanks, .field = &O::nproc_per_node},
      {.name = "log-dir", .value = "DIR", .help = "also write every rank's output there", .commands = kTrain | kEval | kBench, .field = &O::log_dir, .semantic = false},
      {.name = "device", .value = "KIND", .help = "auto, cpu, cuda or cudaemu", .commands = kRun | kShow, .field = &O::device, .choices = {"auto", "cpu", "cuda", "cudaemu"}},
      {.name = "threads", .value = "T", .help = "threads a rank (default: cores / ranks)", .commands = kRun, .field = &O::threads, .least = 1, .semantic = false},
      {.name = "precision", .value = "P", .help = "fp32: as the model says", .commands = kTrain | kBench, .field = &O::precision, .choices = {"fp32"}, .later = {"bf16"}},
      {.name = "out", .value = "RUN_DIR", .help = "folder of the run (default: runs/STEM-N)", .commands = kTrain, .field = &O::out, .semantic = false},
      {.name = "save-every", .value = "N[steps|epochs]", .help = "how often a checkpoint is written", .commands = kTrain, .field = &O::save_every, .semantic = false},
      {.name = "keep", .value = "K", .help = "checkpoints to keep", .commands = kTrain, .field = &O::keep, .least = 1, .semantic = false},
      {.name = "resume", .value = "auto|PATH", .help = "continue a run: the newest whole checkpoint, or this one", .commands = kTrain, .field = &O::resume, .semantic = false},
      {.name = "on-nan", .value = "WHAT", .help = "a loss that is no number: stop (exit 4) or ignore", .commands = kTrain, .field = &O::on_nan, .choices = {"stop", "ignore"}, .later = {"skip"}},
      {.name = "bucket-mb", .value = "X", .help = "size of gradient buckets (0: the policy's)", .commands = kGraph, .field = &O::bucket_mb, .least = 0},
      {.name = "bucket-policy", .value = "NAME", .help = "how gradients are put into buckets: planned or torch", .commands = kGraph, .field = &O::bucket_policy, .choices = {"planned", "torch"}},
      {.name = "loss-denominator", .value = "KIND", .help = "global: the mean over the rows of all ranks", .commands = kGraph, .field = &O::loss_denominator, .choices = {"global"}, .later = {"rank"}},
      {.name = "collective-timeout", .value = "S", .help = "seconds until a rank that does not answer is given up", .commands = kTrain | kEval | kBench, .field = &O::collective_timeout, .least = 0, .positive = true, .semantic = false},
      {.name = "log-every", .value = "N", .help = "optimizer steps between lines of metrics.jsonl", .commands = kTrain, .field = &O::log_every, .least = 1, .semantic = false},
      {.name = "quiet", .help = "no banner and no progress", .commands = kTrain | kEval, .field = &O::quiet, .semantic = false},
      {.name = "warmup", .value = "W", .help = "steps before the timed ones", .commands = kBench, .field = &O::warmup, .least = 0},
      {.name = "stage", .value = "S", .help = "import, canonicalise, loss, autodiff, simplify, accumulate, distribute, guard, optimizer, fuse, plan", .commands = kShow, .field = &O::stage},
      {.name = "ranks", .value = "N", .help = "ranks that the graph is made for", .commands = kShow, .field = &O::ranks, .least = 1},
      {.name = "format", .value = "F", .help = "text, dot or onnx", .commands = kShow, .field = &O::format, .choices = {"text", "dot", "onnx"}},
      {.name = "output", .aliases = {"o"}, .value = "FILE", .help = "the file to write", .commands = kPredict | kExport | kShow, .field = &O::output},
      {.name = "json", .help = "one JSON object", .commands = kCheck, .field = &O::json},
  };
  // clang-format on
  return t;
}

std::string canonical(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

/// Numbers that users write: 1e-3, 10, .5; nothing else.
template <class T>
T parse_number(const OptionDef& def, const std::string& text, const std::string& origin) {
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  T value{};
  const auto [stop, error] = std::from_chars(begin, end, value);
  const bool whole = std::is_integral_v<T>;
  if (begin == end || error != std::errc() || stop != end)
    throw usage_error(cat(origin, ": '", text, "' is not a ", whole ? "whole number" : "number"));
  const double number = static_cast<double>(value);
  if (!std::isfinite(number) || number < def.least || (def.positive && number == def.least))
    throw usage_error(cat(origin, ": ", text, " is out of range"))
        .hint(cat("a ", whole ? "whole number" : "number", def.positive ? " greater than " : " from ",
                  number_str(def.least)));
  return value;
}

bool parse_switch(const std::string& text, const std::string& origin) {
  if (text == "true") return true;
  if (text == "false") return false;
  throw usage_error(cat(origin, ": '", text, "' is neither true nor false"));
}

void check_choice(const OptionDef& def, const std::string& text, const std::string& origin) {
  if (def.choices.empty() || std::find(def.choices.begin(), def.choices.end(), text) != def.choices.end())
    return;
  if (std::find(def.later.begin(), def.later.end(), text) != def.later.end())
    throw usage_error(cat(origin, ": '", text, "' is not in this version"))
        .hint("it has: " + joined(def.choices));
  throw usage_error(cat(origin, ": unknown value '", text, "'", did_you_mean(text, def.choices)))
      .hint("one of: " + joined(def.choices));
}

void clear(Options& options, const OptionDef& def) {
  const Options defaults;
  std::visit([&](auto member) { options.*member = defaults.*member; }, def.field);
}

}  // namespace

const std::vector<OptionDef>& option_table() {
  static const std::vector<OptionDef> table = make_table();
  return table;
}

const std::vector<std::pair<std::string, std::string>>& later_options() {
  static const std::string nodes =
      "training on several machines is not in this version; --nproc-per-node starts ranks on this one";
  static const std::vector<std::pair<std::string, std::string>> options = {
      {"nnodes", nodes},
      {"node-rank", nodes},
      {"master-addr", nodes},
      {"master-port", nodes},
      {"max-restarts", "restarts are not in this version; start again with --resume auto"},
      {"profile", "the profiler is not in this version; `onnx-ddp bench` times whole steps"},
      {"preempt-exit-code", "not in this version; a run that was asked to stop exits with 0"},
      {"patience", "early stopping is not in this version; best.onnx keeps the best model"},
      {"ema", "averaged weights are not in this version"}};
  return options;
}

const OptionDef* find_option(const std::string& name) {
  const std::string wanted = canonical(name);
  for (const OptionDef& def : option_table())
    if (def.name == wanted || std::find(def.aliases.begin(), def.aliases.end(), wanted) != def.aliases.end())
      return &def;
  return nullptr;
}

bool is_list(const OptionDef& def) {
  return std::holds_alternative<std::vector<std::string> Options::*>(def.field);
}
bool is_switch(const OptionDef& def) { return std::holds_alternative<bool Options::*>(def.field); }

void set_option(Options& options, const OptionDef& def, const std::string& text, const std::string& origin) {
  if (const auto* flag = std::get_if<bool Options::*>(&def.field)) {
    options.** flag = parse_switch(text, origin);
  } else if (const auto* whole = std::get_if<std::int64_t Options::*>(&def.field)) {
    options.** whole = parse_number<std::int64_t>(def, text, origin);
  } else if (const auto* maybe_whole = std::get_if<std::optional<std::int64_t> Options::*>(&def.field)) {
    options.** maybe_whole = parse_number<std::int64_t>(def, text, origin);
  } else if (const auto* number = std::get_if<double Options::*>(&def.field)) {
    options.** number = parse_number<double>(def, text, origin);
  } else if (const auto* maybe_number = std::get_if<std::optional<double> Options::*>(&def.field)) {
    options.** maybe_number = parse_number<double>(def, text, origin);
  } else if (const auto* words = std::get_if<std::string Options::*>(&def.field)) {
    check_choice(def, text, origin);
    options.** words = text;
  } else {
    options.*std::get<std::vector<std::string> Options::*>(def.field) = {text};
  }
  if (!def.rival.empty()) clear(options, *find_option(def.rival));
}

void set_option(Options& options, const OptionDef& def, const std::vector<std::string>& list) {
  options.*std::get<std::vector<std::string> Options::*>(def.field) = list;
  if (!def.rival.empty()) clear(options, *find_option(def.rival));
}

std::string toml_value(const Options& options, const OptionDef& def) {
  const Options defaults;
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = options.*member;
        using T = std::decay_t<decltype(value)>;
        // A rival that is at its default was not chosen: written down it would clear the one that was.
        if (!def.rival.empty() && value == defaults.*member) return "";
        if constexpr (std::is_same_v<T, bool>)
          return value ? "true" : "false";
        else if constexpr (std::is_same_v<T, std::int64_t>)
          return cat(value);
        else if constexpr (std::is_same_v<T, double>)
          return toml_float(value);
        else if constexpr (std::is_same_v<T, std::string>)
          return toml_string(value);
        else if constexpr (std::is_same_v<T, std::vector<std::string>>)
          return toml_list(value);
        else if constexpr (std::is_same_v<T, std::optional<double>>)
          return value ? toml_float(*value) : "";
        else
          return value ? cat(*value) : "";
      },
      def.field);
}

void unknown_option(const std::string& name, unsigned command, const std::string& origin) {
  const std::string wanted = canonical(name);
  for (const auto& [later, why] : later_options())
    if (later == wanted) throw usage_error(cat(origin, ": ", why));
  std::vector<std::string> known = {"config"};
  for (const OptionDef& def : option_table()) {
    if ((def.commands & command) == 0) continue;
    known.push_back(def.name);
    for (const std::string& alias : def.aliases) known.push_back(alias);
  }
  if (find_option(name) != nullptr)
    throw usage_error(cat(origin, ": this command has no such option"))
        .hint("`onnx-ddp COMMAND --help` lists a command's options");
  std::string near = nearest(wanted, known);
  if (!near.empty() && origin.starts_with('-')) near = (near.size() == 1 ? "-" : "--") + near;
  throw usage_error(cat(origin, ": unknown option", near.empty() ? "" : cat("; did you mean '", near, "'?")))
      .hint("`onnx-ddp COMMAND --help` lists a command's options");
}

}  // namespace onnxddp

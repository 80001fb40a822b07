// onnx-ddp train
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/train/run_folder.h"
#include "executor/train/trainer.h"

namespace onnxddp {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    throw Error(cat("cannot read '", path.string(), "', which says how the run was made"));
  return text.str();
}

/// A run goes on with its own model. A copy of the file is the same; one that is gone cannot be compared.
void check_same_model(const std::string& was, const std::string& now, const std::filesystem::path& run) {
  std::error_code error;
  if (was.empty() || was == now || !std::filesystem::is_regular_file(was, error) ||
      std::filesystem::equivalent(was, now, error))
    return;
  if (std::filesystem::is_regular_file(now, error) && text_of(was) == text_of(now)) return;
  throw usage_error(cat("--resume: '", run.string(), "' was trained from '", was, "', not '", now, "'"))
      .hint(cat("onnx-ddp train ", was, " --resume ", run.string(), " continues it"));
}

/// How the options differ from those of the run that they continue.
std::vector<std::string> changes_since(const Options& options) {
  std::vector<std::string> lines;
  const std::optional<ResumeSource> source = options.resume.empty() ? std::nullopt : find_resume(options);
  if (!source) return lines;
  Options base;
  apply_config(base, text_of(source->options_file), source->options_file.string(), kTrain, nullptr);
  for (const OptionDef& def : option_table()) {
    if ((def.commands & kTrain) == 0 || def.name == "resume" || def.name == "out" || def.name == "quiet")
      continue;
    const std::string was = toml_value(base, def), now = toml_value(options, def);
    if (was != now)
      lines.push_back(
          cat(def.name, " was ", was.empty() ? "unset" : was, ", now ", now.empty() ? "unset" : now));
  }
  return lines;
}

/// The options with those of the run to resume below, and --resume and --out made definite.
Options resolve_resume(const CommandLine& line) {
  Options options = line.options;
  if (process().rank || options.resume.empty()) return options;
  const std::optional<ResumeSource> source = find_resume(options);
  if (!source) {
    if (options.model.empty())
      throw usage_error(cat("--resume auto: '", options.out, "' holds no run")).hint("MODEL starts one");
    say("--resume auto: there is no run to continue, starting from the beginning");
    options.resume.clear();
    return options;
  }
  Options base;
  apply_config(base, text_of(source->options_file), source->options_file.string(), kTrain, nullptr);
  base.quiet = false;
  Options merged = line.over(base);
  if (merged.model.empty()) merged.model = base.model;
  check_same_model(base.model, merged.model, source->run);
  merged.out = source->run.string();
  if (options.resume == "auto") merged.resume = merged.out;
  return merged;
}

TrainContext context() {
  TrainContext out;
  out.run_toml = [](const Options& o) {
    Options kept = o;
    kept.resume.clear();  // what is written can be given back for a new run
    return run_toml(kept, kTrain);
  };
  out.semantic = [](const Options& o) { return semantic_text(o, kTrain); };
  out.version = ONNXDDP_VERSION;
  const auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0';
  };
  out.no_color = set("NO_COLOR");
  out.dumb_terminal = set("CI") || (set("TERM") && std::string(std::getenv("TERM")) == "dumb");
  return out;
}

}  // namespace

int run_train(CommandLine& line) {
  const Options options = resolve_resume(line);
  rank_count(options);
  if (!process().rank && options.resume.empty() && !options.out.empty() && holds_run(options.out))
    throw usage_error(cat("'", options.out, "' already holds a run"))
        .hint("--resume auto continues it; --out takes another folder");
  return run_in_ranks(line, options, [&](RankGroup& ranks) {
    TrainContext with = context();
    with.changes = [&] { return changes_since(options); };
    TrainSetup setup = prepare_training(options, ranks.rank(), ranks.size());
    return train(setup, ranks, with);
  });
}

}  // namespace onnxddp

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

/// The options with those of the run to resume below, and --resume and --out made definite.
Options resolve_resume(const CommandLine& line) {
  Options options = line.options;
  if (process().rank || options.resume.empty()) return options;
  const std::optional<ResumeSource> source = find_resume(options);
  if (!source) {
    say("--resume auto: there is no run to continue, starting from the beginning");
    options.resume.clear();
    return options;
  }
  std::ifstream file(source->options_file, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    throw Error(cat("cannot read '", source->options_file.string(), "', which says how the run was made"));
  Options base;
  apply_config(base, text.str(), source->options_file.string(), kTrain, nullptr);
  base.quiet = false;
  Options merged = line.over(base);
  for (const OptionDef& def : option_table()) {
    if ((def.commands & kTrain) == 0 || line.given.count(def.name) == 0 || def.name == "resume" ||
        def.name == "out")
      continue;
    const std::string was = toml_value(base, def), now = toml_value(merged, def);
    if (was != now)
      say(cat("resume: ", def.name, " was ", was.empty() ? "unset" : was, ", now ",
              now.empty() ? "unset" : now));
  }
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
    TrainSetup setup = prepare_training(options, ranks.rank(), ranks.size());
    return train(setup, ranks, context());
  });
}

}  // namespace onnxddp

#include "executor/cli/run_command.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "executor/cli/config.h"
#include "executor/cuda/loader.h"
#include "executor/train/run_folder.h"

namespace onnxddp {
namespace {

std::vector<std::string> values_of(const Options& options, const OptionDef& def) {
  if (is_list(def)) return options.*std::get<std::vector<std::string> Options::*>(def.field);
  if (const auto* text = std::get_if<std::string Options::*>(&def.field)) {
    const std::string& value = options.**text;
    return value.empty() ? std::vector<std::string>() : std::vector<std::string>{value};
  }
  const std::string value = toml_value(options, def);
  return value.empty() ? std::vector<std::string>() : std::vector<std::string>{value};
}

std::string read_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

Process& process() {
  static Process instance;
  return instance;
}

void say(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

Options resolve_run(const CommandLine& line, const std::vector<std::string>& keys) {
  std::error_code error;
  if (process().rank || !std::filesystem::is_directory(line.options.model, error)) return line.options;
  const std::filesystem::path folder = line.options.model;
  Options run, base;
  if (std::filesystem::exists(folder / "run.toml", error))
    apply_config(run, read_file(folder / "run.toml"), (folder / "run.toml").string(), kTrain, nullptr);
  for (const std::string& key : keys)
    std::visit([&](auto member) { base.*member = run.*member; }, find_option(key)->field);
  const bool reads_data = (line.command->bit & find_option("data")->commands) != 0;
  if (line.command->bit == kEval) base.data = run.eval_data.empty() ? run.data : run.eval_data;
  if (reads_data && line.given.count("data") == 0 && base.data.empty())
    throw usage_error(cat("no data: --data is not given",
                          line.command->bit == kEval ? cat(", and '", folder.string(), "' names none") : ""))
        .hint("--data FILE.npz");
  Options merged = line.over(base);
  merged.model = model_of(folder).string();
  return merged;
}

std::vector<std::string> as_flags(const Options& options, unsigned command) {
  std::vector<std::string> flags;
  for (const OptionDef& def : option_table()) {
    if ((def.commands & command) == 0) continue;
    for (const std::string& value : values_of(options, def)) flags.push_back("--" + def.name + "=" + value);
  }
  return flags;
}

int run_in_ranks(const CommandLine& line, const Options& options,
                 const std::function<int(RankGroup&)>& work) {
  check_device(options.device);
  const auto timeout =
      std::chrono::milliseconds(static_cast<std::int64_t>(options.collective_timeout * 1000));
  if (process().rank || rank_count(options) == 1) {
    RankGroup ranks(process().rank, timeout);
    try {
      return work(ranks);
    } catch (const Error& error) {
      if (ranks.should_print(error.report()))
        print_error(error.report(), process().rank && process().rank->lifeline < 0 ? ranks.rank() : -1);
      return error.exit_code();
    }
  }
  LaunchOptions launch_options;
  launch_options.nproc = rank_count(options);
  launch_options.log_dir = options.log_dir;
  launch_options.command = {process().program, line.command->name};
  for (std::string& flag : as_flags(options, line.command->bit))
    launch_options.command.push_back(std::move(flag));
  launch_options.command.insert(launch_options.command.end(), {"--", options.model});
  return launch(launch_options);
}

void print_error(const std::string& report, int rank) {
  constexpr std::size_t kLines = 6, kWidth = 400;
  std::string text = rank > 0 ? cat("onnx-ddp: error: rank ", rank, ": ") : "onnx-ddp: error: ";
  std::istringstream lines(report);
  std::size_t count = 0;
  for (std::string one; count < kLines && std::getline(lines, one); ++count) {
    if (one.size() > kWidth) one = one.substr(0, kWidth) + "...";
    text += printable(one) + "\n";
  }
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace onnxddp

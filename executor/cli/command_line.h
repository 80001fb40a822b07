// From argv to Options: flags over --config over defaults.
#pragma once

#include <string>
#include <vector>

#include "executor/cli/option_table.h"

namespace onnxddp {

struct CommandDef {
  std::string name;
  unsigned bit;
  std::string operand;  // "MODEL.onnx"; "": none
  std::string help;     // one line
  std::string example;
  int (*run)(struct CommandLine& line);
};
const std::vector<CommandDef>& commands();

struct CommandLine {
  std::vector<std::string> argv;  // as given, the program's own path first
  const CommandDef* command = nullptr;
  Options options;              // defaults, then the file of --config, then flags
  std::set<std::string> given;  // long names of options that came from flags or the file
  std::vector<std::pair<const OptionDef*, std::vector<std::string>>>
      flags;  // in order, to be applied over another base
  bool help = false;

  /// The options again with run.toml between the defaults and what was given (resume, eval of a RUN).
  Options over(const Options& base) const;
};

/// Reads the words behind the sub-command's name. Throws a usage Error for anything that is not understood.
CommandLine parse_command_line(const CommandDef& command, const std::vector<std::string>& argv);

/// Applies the file's keys; `given` collects their long names. Keys that belong to other commands are
/// accepted.
void apply_config(Options& options, const std::string& text, const std::string& file, unsigned command,
                  std::set<std::string>* given);
/// Every effective value as valid TOML, in the table's order.
std::string run_toml(const Options& options, unsigned command);
/// The lines of run_toml on which ranks must agree.
std::string semantic_text(const Options& options, unsigned command);

/// `onnx-ddp --help` and `onnx-ddp COMMAND --help`.
std::string program_help();
std::string command_help(const CommandDef& command);

}  // namespace onnxddp

// The option table: one line a flag. Parsing, --help, near matches, reading --config and writing run.toml
// come from it.
#pragma once

#include <functional>
#include <limits>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "executor/train/options.h"

namespace onnxddp {

/// Sub-commands as bits.
enum Command : unsigned {
  kTrain = 1,
  kEval = 2,
  kPredict = 4,
  kCheck = 8,
  kShow = 16,
  kExport = 32,
  kBench = 64,
  kOps = 128
};

using Field = std::variant<bool Options::*, std::int64_t Options::*, double Options::*,
                           std::string Options::*, std::vector<std::string> Options::*,
                           std::optional<std::int64_t> Options::*, std::optional<double> Options::*>;

struct OptionDef {
  std::string name;                       // long flag without dashes; also the configuration key
  std::vector<std::string> aliases = {};  // further long names; one letter: a short flag
  std::string value = {};                 // what the help calls the value; "" for switches
  std::string help;
  unsigned commands;  // bits of Command
  Field field;
  std::vector<std::string> choices = {};  // the only accepted values; empty: any
  std::vector<std::string> later = {};    // values that a later version will accept
  double least = -std::numeric_limits<double>::infinity();
  bool positive = false;   // numbers: greater than `least`, not equal
  std::string rival = {};  // an option that may not be given beside this one, and that this one clears
  bool semantic = true;    // changes what is computed: ranks must agree on it
};

/// All options, in the order of --help.
const std::vector<OptionDef>& option_table();
/// Options that later versions will have, with what to say.
const std::vector<std::pair<std::string, std::string>>& later_options();

/// The option of that name or alias (- and _ are the same), or null.
const OptionDef* find_option(const std::string& name);
/// Sets the field from text; throws a usage Error naming `origin` (a flag or file:line) and the accepted
/// values.
void set_option(Options& options, const OptionDef& def, const std::string& text, const std::string& origin);
void set_option(Options& options, const OptionDef& def, const std::vector<std::string>& list);
/// The value as TOML text, or "" when the option is unset.
std::string toml_value(const Options& options, const OptionDef& def);
bool is_list(const OptionDef& def);
bool is_switch(const OptionDef& def);

/// Throws a usage Error for an unknown option or one of a later version; `origin` as above.
[[noreturn]] void unknown_option(const std::string& name, unsigned command, const std::string& origin);

}  // namespace onnxddp

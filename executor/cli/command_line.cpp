#include "executor/cli/command_line.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "executor/cli/config.h"
#include "graph/nearest.h"

namespace onnxddp {
namespace {

std::string read_text(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  if (!in || !(text << in.rdbuf())) throw usage_error(cat("cannot read the configuration '", file, "'"));
  return text.str();
}

bool is_flag(const std::string& word) {
  return word.size() > 1 && word[0] == '-' &&
         (word[1] == '-' || std::isalpha(static_cast<unsigned char>(word[1])) != 0);
}

/// Goes through the words once and sorts them into flags, the file of --config and operands.
class Words {
 public:
  Words(CommandLine& line, std::string& config) : line_(line), config_(config), words_(line.argv) {}

  void read() {
    for (at_ = 2; at_ < words_.size(); ++at_) {
      const std::string& word = words_[at_];
      if (word == "--help" || word == "-h")
        line_.help = true;
      else if (!only_operands_ && word == "--")
        only_operands_ = true;
      else if (!only_operands_ && is_flag(word))
        flag(word);
      else
        operand(word);
    }
  }

 private:
  void operand(const std::string& word) {
    const std::string& name = line_.command->operand;
    if (name.empty())
      throw usage_error(cat("unexpected '", word, "': ", line_.command->name, " takes no file"));
    if (!line_.options.model.empty())
      throw usage_error(cat("unexpected '", word, "': ", name, " is already '", line_.options.model, "'"));
    if (word.empty()) throw usage_error(name + " is empty");
    line_.options.model = word;
  }

  void flag(const std::string& word) {
    const std::size_t equals = word.find('=');
    const std::string dashed = word.substr(0, equals);
    const std::string name = dashed.substr(dashed.starts_with("--") ? 2 : 1);
    std::optional<std::string> value;
    if (equals != std::string::npos) value = word.substr(equals + 1);
    if (name == "config") {
      config_ = value ? *value : next(dashed);
      return;
    }
    const OptionDef* def = find_option(name);
    const bool spelled = def != nullptr && (dashed.starts_with("--") ? name.size() > 1 : name.size() == 1);
    if (!spelled || (def->commands & line_.command->bit) == 0)
      unknown_option(name, line_.command->bit, dashed);
    take(*def, dashed, value);
  }

  void take(const OptionDef& def, const std::string& dashed, const std::optional<std::string>& value) {
    std::vector<std::string> values;
    if (is_switch(def))
      values = {value.value_or("true")};
    else if (value)
      values = {*value};
    else if (!is_list(def))
      values = {next(dashed)};
    else
      while (at_ + 1 < words_.size() && !is_flag(words_[at_ + 1])) values.push_back(words_[++at_]);
    if (values.empty()) throw usage_error(cat(dashed, " expects ", def.value));
    for (auto& [earlier, list] : line_.flags) {
      if (earlier->name == def.rival)
        throw usage_error(cat("--", earlier->name, " and --", def.name, " exclude each other"));
      if (earlier != &def) continue;
      if (!is_list(def)) throw usage_error(cat(dashed, " is given twice"));
      list.insert(list.end(), values.begin(), values.end());
      return;
    }
    line_.flags.emplace_back(&def, values);
  }

  std::string next(const std::string& dashed) {
    if (at_ + 1 >= words_.size() || (is_flag(words_[at_ + 1])))
      throw usage_error(cat(dashed, " expects a value"));
    return words_[++at_];
  }

  CommandLine& line_;
  std::string& config_;
  const std::vector<std::string>& words_;
  std::size_t at_ = 0;
  bool only_operands_ = false;
};

void apply_flags(Options& options, const CommandLine& line) {
  for (const auto& [def, values] : line.flags) {
    if (is_list(*def))
      set_option(options, *def, values);
    else
      set_option(options, *def, values[0], "--" + def->name);
  }
}

/// Words wrapped to the width of a terminal, behind a column of names.
std::string two_columns(const std::string& left, const std::string& right) {
  constexpr std::size_t kIndent = 28, kWidth = 100;
  std::string out = "  " + left;
  out.resize(std::max(out.size() + 1, kIndent), ' ');
  std::size_t column = out.size();
  std::istringstream words(right);
  for (std::string word; words >> word;) {
    if (column + word.size() > kWidth) {
      out += "\n" + std::string(kIndent, ' ');
      column = kIndent;
    }
    out += word + " ";
    column += word.size() + 1;
  }
  out.erase(out.find_last_not_of(' ') + 1);
  return out + "\n";
}

}  // namespace

void apply_config(Options& options, const std::string& text, const std::string& file, unsigned command,
                  std::set<std::string>* given) {
  std::set<std::string> seen;
  for (const ConfigEntry& entry : parse_toml(text, file)) {
    const std::string origin = cat(file, ":", entry.line, ": ", entry.key);
    if (entry.key == "model") {
      if (options.model.empty()) options.model = entry.text;
      continue;
    }
    const OptionDef* def = find_option(entry.key);
    if (def == nullptr) unknown_option(entry.key, command, origin);
    if (!seen.insert(def->name).second) throw usage_error(cat(origin, " is given twice"));
    if (!def->rival.empty() && seen.count(def->rival) != 0)
      throw usage_error(cat(origin, " and ", def->rival, " exclude each other"));
    if (entry.is_list && !is_list(*def)) throw usage_error(cat(origin, " expects one value, not an array"));
    if (entry.is_list)
      set_option(options, *def, entry.list);
    else
      set_option(options, *def, entry.text, origin);
    if (given != nullptr) given->insert(def->name);
  }
}

Options CommandLine::over(const Options& base) const {
  Options merged = base;
  for (const OptionDef& def : option_table()) {
    if (given.count(def.name) == 0) continue;
    std::visit([&](auto member) { merged.*member = options.*member; }, def.field);
    if (def.rival.empty()) continue;
    std::visit([&](auto member) { merged.*member = options.*member; }, find_option(def.rival)->field);
  }
  merged.model = options.model;
  return merged;
}

CommandLine parse_command_line(const CommandDef& command, const std::vector<std::string>& argv) {
  CommandLine line;
  line.argv = argv;
  line.command = &command;
  std::string config;
  Words(line, config).read();
  if (line.help) return line;
  if (!config.empty()) apply_config(line.options, read_text(config), config, command.bit, &line.given);
  apply_flags(line.options, line);
  for (const auto& [def, values] : line.flags) line.given.insert(def->name);
  const Options& o = line.options;
  const bool run_names_it =
      command.bit == kTrain && !o.resume.empty() && (o.resume != "auto" || !o.out.empty());
  if (!command.operand.empty() && o.model.empty() && !run_names_it) {
    Error error = usage_error(cat("onnx-ddp ", command.name, " needs ", command.operand));
    error.add_hint(cat("for example: ", command.example));
    throw error;
  }
  check_options(line.options);
  return line;
}

std::string run_toml(const Options& options, unsigned command) {
  std::string out = "model = " + toml_string(options.model) + "\n";
  for (const OptionDef& def : option_table()) {
    if ((def.commands & command) == 0) continue;
    const std::string value = toml_value(options, def);
    if (!value.empty()) out += def.name + " = " + value + "\n";
  }
  return out;
}

std::string semantic_text(const Options& options, unsigned command) {
  std::string out;
  for (const OptionDef& def : option_table()) {
    if ((def.commands & command) == 0 || !def.semantic) continue;
    out += def.name + " = " + toml_value(options, def) + "\n";
  }
  return out;
}

std::string program_help() {
  std::string out =
      "onnx-ddp trains ONNX models, on one device or on many.\n\n"
      "Examples:\n"
      "  onnx-ddp train model.onnx --data data.npz\n"
      "  onnx-ddp train model.onnx --data data.npz --nproc-per-node 2 --sync-bn\n"
      "  onnx-ddp eval runs/model-1 --data test.npz\n\n"
      "Commands:\n";
  for (const CommandDef& command : commands())
    out += two_columns(command.name + " " + command.operand, command.help);
  out += "\n" + two_columns("COMMAND --help", "the options of a command") +
         two_columns("--version", "the version");
  out +=
      "\nExit codes: 0 done, 1 mistake in model or data, 2 usage, 3 a peer failed, 4 diverged, 70 internal, "
      "130 interrupted.\n";
  return out;
}

std::string command_help(const CommandDef& command) {
  std::string out = cat("onnx-ddp ", command.name, command.operand.empty() ? "" : " ", command.operand, ": ",
                        command.help, "\n\nExample:\n  ", command.example,
                        "\n\nOptions (each is also a key of a --config file; - and _ are the same):\n");
  const Options defaults;
  for (const OptionDef& def : option_table()) {
    if ((def.commands & command.bit) == 0) continue;
    std::string names;
    for (const std::string& alias : def.aliases) names += (alias.size() == 1 ? "-" : "--") + alias + ", ";
    names += "--" + def.name + (def.value.empty() ? "" : " " + def.value);
    std::string value = is_switch(def) || is_list(def) ? "" : toml_value(defaults, def);
    if (value == "\"\"") value.clear();
    out += two_columns(names, def.help + (value.empty() ? "" : " [" + value + "]"));
  }
  return out + two_columns("--config FILE", "a TOML file of options; flags win over it");
}

}  // namespace onnxddp

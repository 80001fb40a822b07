// onnx-ddp check
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/plan/plan.h"
#include "executor/train/setup.h"

namespace onnxddp {
namespace {

struct Row {
  std::string name, type, role, why;
};

/// Everything that is found out; problems do not stop the search for more.
struct Findings {
  std::string model, data, loss, memory;
  std::vector<Row> rows;
  std::vector<std::string> notes, warnings, problems;
  std::int64_t trained = 0, values = 0;  // elements
};

class Check {
 public:
  explicit Check(const Options& options) : o_(options) {}

  Findings run() {
    std::shared_ptr<const OnnxModel> file;
    attempt([&] { file = load_onnx(o_.model); });
    if (!file) return std::move(found_);
    attempt([&] { model_ = import_onnx(file, import_options(o_, true)); });
    attempt([&] { found_.warnings = training_form_losses(*file); });
    if (!model_) return std::move(found_);
    attempt([&] { check_weights(*model_, o_.model); });
    attempt([&] { eval_model_ = import_onnx(file, import_options(o_, false)); });
    found_.model =
        cat(o_.model, ": ", model_->graph.order.size(), " nodes, ", model_->roles.size(), " tensors");
    found_.notes = model_->notes;
    const bool form =
        !found_.warnings.empty();  // says in more words what the import warns of: folded batch norms
    for (const std::string& warning : model_->warnings)
      if (!form || warning.find("folded") == std::string::npos) add_warning(warning);
    program_ = program_options(o_, rank_count(o_));
    attempt([&] { target(); });
    if (found_.problems.empty())
      attempt([&] { programs_ = build_programs(*model_, *eval_model_, program_); });
    table();
    if (programs_) conclude();
    return std::move(found_);
  }

 private:
  template <class Work>
  void attempt(Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.exit_code() == kExitUsage) throw;
      found_.problems.push_back(error.report());
    }
  }

  void add_warning(const std::string& text) {
    if (std::find(found_.warnings.begin(), found_.warnings.end(), text) == found_.warnings.end())
      found_.warnings.push_back(text);
  }

  void target() {
    std::vector<std::filesystem::path> files(o_.data.begin(), o_.data.end());
    const std::filesystem::path neighbour = std::filesystem::path(o_.model).replace_extension(".npz");
    std::error_code error;
    if (files.empty() && std::filesystem::exists(neighbour, error)) files.push_back(neighbour);
    if (files.empty()) {
      assume_target(*model_, o_, program_, found_.notes);
      return;
    }
    const std::unique_ptr<Dataset> data = open_dataset(files);
    const Target settled = settle_target(*model_, *data, o_, file_list(files), program_, found_.notes);
    dims_ = settled.dims;
    found_.data = cat(file_list(files), ": ", data->size(), " rows");
    for (const Column& column : settled.inputs)
      found_.data += cat(", ", data->arrays()[column.array].name, " -> input ", column.input);
    if (settled.column)
      found_.data +=
          cat(", ", data->arrays()[settled.column->array].name, " -> target ", program_.target_type);
  }

  void table() {
    for (const TensorRole& role : model_->roles) {
      Row row{role.name, role.type.str(), std::string(role_name(role.role)), role.reason};
      const bool unused = programs_ && std::find(programs_->unused.begin(), programs_->unused.end(),
                                                 role.name) != programs_->unused.end();
      if (unused) {
        row.role = "unused";
        row.why += row.why.empty() ? "the loss does not depend on it" : "; the loss does not depend on it";
        add_warning(cat(role.name, " will not change: the loss does not depend on it (--freeze '", role.name,
                        "' says that this is meant)"));
      }
      found_.rows.push_back(std::move(row));
    }
    const ValueCounts counts =
        count_values(*model_, programs_ ? programs_->unused : std::vector<std::string>());
    found_.trained = counts.trained;
    found_.values = counts.all;
  }

  void conclude() {
    found_.loss = cat(program_.loss, " on ", programs_->loss.input);
    for (const std::string& note : programs_->loss.notes) found_.notes.push_back(note);
    if (!programs_->loss.exact) found_.notes.push_back("the loss of several ranks is the mean of theirs");
    attempt([&] {
      const std::int64_t batch = o_.batch_size.value_or(fixed_batch(*model_).value_or(32));
      DimBindings dims = dims_;
      if (!fixed_batch(*model_)) dims[model_->batch_symbol] = batch;
      Graph bound = programs_->step;
      bind_dims(bound, dims);
      if (!free_symbols(bound).empty()) return;
      StateLayout layout;
      const Plan plan = make_plan(bound, *make_cpu_device(1), layout);
      const auto kib = [](std::size_t bytes) { return cat((bytes + 1023) / 1024, " KiB"); };
      found_.memory = cat("per rank at batch ", batch, ": weights and state ", kib(plan.state_bytes),
                          ", activations ", kib(plan.arena_bytes), ", gradients ", kib(plan.grads_bytes),
                          ", data ", kib(plan.feeds_bytes), "; ", plan.collectives, " collectives a step");
    });
  }

  const Options& o_;
  Findings found_;
  std::optional<ImportedModel> model_, eval_model_;
  std::optional<Programs> programs_;
  ProgramOptions program_;
  DimBindings dims_;
};

void print_table(const std::vector<Row>& rows) {
  std::size_t name = 6, type = 4, role = 4;
  for (const Row& row : rows) {
    name = std::max(name, std::min<std::size_t>(row.name.size(), 60));
    type = std::max(type, row.type.size());
    role = std::max(role, row.role.size());
  }
  const auto line = [&](const Row& row) {
    std::printf("  %-*s  %-*s  %-*s  %s\n", static_cast<int>(name), row.name.c_str(), static_cast<int>(type),
                row.type.c_str(), static_cast<int>(role), row.role.c_str(), row.why.c_str());
  };
  line({"tensor", "type", "role", "why"});
  for (const Row& row : rows) line(row);
}

std::string shell_quoted(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+@%-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

/// The command that trains what was checked: with every option that was given.
std::string train_command(const CommandLine& line, bool has_data) {
  const std::string& model = line.options.model;
  std::string out = "onnx-ddp train " + shell_quoted(model.starts_with('-') ? "./" + model : model);
  for (const std::string& flag : as_flags(line.options, kTrain)) {
    const std::size_t equals = flag.find('=');
    const OptionDef& def = *find_option(flag.substr(2, equals - 2));
    if (line.given.count(def.name) == 0) continue;
    const std::string value = flag.substr(equals + 1);
    if (is_switch(def) && value == "true")
      out += " --" + def.name;
    else if (is_switch(def) || value.starts_with('-'))
      out += " " + shell_quoted(flag);
    else
      out += " --" + def.name + " " + shell_quoted(value);
  }
  return out + (has_data ? "" : " --data FILE.npz");
}

void print_text(const Findings& found, const CommandLine& command) {
  if (!found.model.empty()) std::printf("model    %s\n", found.model.c_str());
  if (!found.data.empty()) std::printf("data     %s\n", found.data.c_str());
  if (!found.loss.empty()) std::printf("loss     %s\n", found.loss.c_str());
  for (const std::string& note : found.notes) std::printf("note     %s\n", note.c_str());
  if (!found.rows.empty()) {
    std::printf("\n");
    print_table(found.rows);
    std::printf("%lld of %lld values train\n\n", static_cast<long long>(found.trained),
                static_cast<long long>(found.values));
  }
  if (!found.memory.empty()) std::printf("%s\n", found.memory.c_str());
  for (const std::string& warning : found.warnings) std::printf("warning  %s\n", warning.c_str());
  for (const std::string& problem : found.problems) std::printf("problem  %s\n", problem.c_str());
  if (!found.problems.empty()) {
    std::printf("not trainable: %zu %s\n", found.problems.size(),
                found.problems.size() == 1 ? "problem" : "problems");
    return;
  }
  std::printf("ok: trainable\nnext     %s\n", train_command(command, !found.data.empty()).c_str());
}

void print_json(const Findings& found, const Options& options) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (const Row& row : found.rows)
    tensors.push_back({{"name", row.name}, {"type", row.type}, {"role", row.role}, {"why", row.why}});
  const nlohmann::ordered_json all = {{"model", options.model},
                                      {"trainable", found.problems.empty()},
                                      {"loss", found.loss},
                                      {"data", found.data},
                                      {"trained_values", found.trained},
                                      {"values", found.values},
                                      {"tensors", tensors},
                                      {"memory", found.memory},
                                      {"notes", found.notes},
                                      {"warnings", found.warnings},
                                      {"problems", found.problems}};
  std::printf("%s\n", all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

}  // namespace

int run_check(CommandLine& line) {
  const Findings found = Check(line.options).run();
  if (line.options.json)
    print_json(found, line.options);
  else
    print_text(found, line);
  std::fflush(stdout);
  return found.problems.empty() ? kExitDone : kExitUserError;
}

}  // namespace onnxddp

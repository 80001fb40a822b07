#include "executor/train/options.h"

#include <algorithm>
#include <charconv>
#include <thread>

#include "graph/nearest.h"

namespace onnxddp {
namespace {

std::optional<std::int64_t> whole_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void check_loss_name(const std::string& text) {
  if (text.empty()) return;
  const Spec spec = parse_spec("--loss", text);
  std::vector<std::string> known;
  for (const auto& [name, help] : loss_names()) known.push_back(name);
  if (std::find(known.begin(), known.end(), spec.name) != known.end()) return;
  std::string list;
  for (const std::string& name : known) list += (list.empty() ? "" : " ") + name;
  throw usage_error(cat("--loss: unknown loss '", spec.name, "'", did_you_mean(spec.name, known)))
      .hint("this version knows: " + list);
}

}  // namespace

Spec parse_spec(const std::string& flag, const std::string& text) {
  Spec spec;
  const std::size_t colon = text.find(':');
  spec.name = text.substr(0, colon);
  if (spec.name.empty())
    throw usage_error(cat(flag, ": '", text, "' has no name")).hint("write NAME or NAME:key=value,key=value");
  std::size_t begin = colon == std::string::npos ? text.size() : colon + 1;
  while (begin < text.size()) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    auto [key, value] = parse_assignment(flag, text.substr(begin, comma - begin));
    std::replace(key.begin(), key.end(), '-', '_');
    if (!spec.options.emplace(key, value).second)
      throw usage_error(cat(flag, ": '", key, "' is given twice"));
    begin = comma + 1;
  }
  return spec;
}

std::pair<std::string, std::string> parse_assignment(const std::string& flag, const std::string& text) {
  const std::size_t equals = text.find('=');
  if (equals == 0 || equals == std::string::npos || equals + 1 == text.size())
    throw usage_error(cat(flag, ": '", text, "' is not of the form name=value"));
  return {text.substr(0, equals), text.substr(equals + 1)};
}

SaveEvery parse_save_every(const std::string& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::optional<std::int64_t> number = whole_number(std::string_view(text).substr(0, digits));
  std::string unit = text.substr(digits);
  if (!unit.empty() && unit.back() == 's') unit.pop_back();
  if (!number || *number < 1 || (!unit.empty() && unit != "step" && unit != "epoch"))
    throw usage_error(cat("--save-every: '", text, "' is not a number of steps or epochs"))
        .hint("write 500, 500steps or 2epochs");
  SaveEvery every;
  (unit == "epoch" ? every.epochs : every.steps) = *number;
  return every;
}

int rank_count(const Options& options) {
  if (options.nproc_per_node == "auto")
    return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const std::optional<std::int64_t> number = whole_number(options.nproc_per_node);
  if (!number || *number < 1 || *number > 4096)
    throw usage_error(cat("--nproc-per-node: '", options.nproc_per_node, "' is not a number of ranks"))
        .hint("write a number from 1, or auto for one per core");
  return static_cast<int>(*number);
}

void check_options(const Options& options) {
  check_loss_name(options.loss);
  const Spec optimizer = parse_spec("--optimizer", options.optimizer);
  hyper_defaults({optimizer.name, optimizer.options});
  const Spec schedule = parse_spec("--schedule", options.schedule);
  check_schedule({schedule.name, schedule.options});
  for (const std::string& text : options.input) parse_assignment("--input", text);
  for (const std::string& text : options.dim) {
    const auto [name, value] = parse_assignment("--dim", text);
    const std::optional<std::int64_t> number = whole_number(value);
    if (!number || *number < 1) throw usage_error(cat("--dim: '", value, "' is not a size for '", name, "'"));
  }
  parse_save_every(options.save_every);
  rank_count(options);
}

}  // namespace onnxddp

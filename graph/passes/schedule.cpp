// Learning-rate schedules: PyTorch's closed forms (torch.optim.lr_scheduler).
#include <cmath>
#include <functional>

#include "graph/nearest.h"
#include "graph/passes/options.h"

namespace onnxddp {
namespace {

/// What a schedule's formula sees: `k` counts steps or epochs from the end of warm-up.
struct Position {
  double lr;
  std::int64_t k;
  std::int64_t total;  // in the same unit
};

struct ScheduleDef {
  std::string name, help;
  std::vector<std::string> options;
  std::function<void(const OptionReader&)> check;
  std::function<double(const OptionReader&, const Position&)> lr;
};

const std::vector<ScheduleDef>& schedules() {
  constexpr double kPi = 3.141592653589793;
  static const std::vector<ScheduleDef> table = {
      {"constant",
       "the same learning rate throughout",
       {},
       [](const OptionReader&) {},
       [](const OptionReader&, const Position& p) { return p.lr; }},
      {"step",
       "StepLR: times gamma (0.1) every step_size",
       {"step_size", "gamma"},
       [](const OptionReader& o) {
         o.require(o.has("step_size") && o.integer("step_size", 0) > 0, "step_size",
                   "given and positive (optimizer steps; epochs with unit=epoch)");
         o.number("gamma", 0.1);
       },
       [](const OptionReader& o, const Position& p) {
         return p.lr * std::pow(o.number("gamma", 0.1), static_cast<double>(p.k / o.integer("step_size", 1)));
       }},
      {"cosine",
       "CosineAnnealingLR: to eta_min (0) over t_max (default: the rest of the run)",
       {"t_max", "eta_min"},
       [](const OptionReader& o) {
         o.require(!o.has("t_max") || o.integer("t_max", 1) > 0, "t_max", "positive");
         o.number("eta_min", 0);
       },
       [](const OptionReader& o, const Position& p) {
         const double low = o.number("eta_min", 0);
         const auto period = static_cast<double>(o.integer("t_max", std::max<std::int64_t>(1, p.total)));
         return low + (p.lr - low) * (1 + std::cos(kPi * static_cast<double>(p.k) / period)) / 2;
       }},
  };
  return table;
}

const ScheduleDef& find_schedule(const std::string& name) {
  std::vector<std::string> names;
  for (const ScheduleDef& def : schedules()) {
    if (def.name == name) return def;
    names.push_back(def.name);
  }
  throw usage_error(cat("there is no schedule '", name, "'", did_you_mean(name, names)))
      .hint("schedules: constant, step, cosine");
}

OptionReader reader(const ScheduleSpec& spec) { return {cat("--schedule ", spec.name), spec.options}; }

}  // namespace

void check_schedule(const ScheduleSpec& spec) {
  const ScheduleDef& def = find_schedule(spec.name);
  std::vector<std::string> known = def.options;
  known.push_back("unit");
  const OptionReader options = reader(spec);
  options.only(known);
  const std::string unit = options.text("unit", "step");
  options.require(unit == "step" || unit == "epoch", "unit", "step or epoch");
  def.check(options);
}

double schedule_lr(const ScheduleSpec& spec, double lr, std::int64_t step, std::int64_t steps_per_epoch,
                   std::int64_t total_steps, std::int64_t warmup_steps) {
  if (step < warmup_steps) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  const OptionReader options = reader(spec);
  Position position{lr, step - warmup_steps, total_steps - warmup_steps};
  if (options.text("unit", "step") == "epoch") {
    const std::int64_t per_epoch = std::max<std::int64_t>(1, steps_per_epoch);
    position.k /= per_epoch;
    position.total = (position.total + per_epoch - 1) / per_epoch;
  }
  return find_schedule(spec.name).lr(options, position);
}

std::vector<std::pair<std::string, std::string>> schedule_names() {
  std::vector<std::pair<std::string, std::string>> out;
  for (const ScheduleDef& def : schedules()) out.emplace_back(def.name, def.help);
  return out;
}

}  // namespace onnxddp

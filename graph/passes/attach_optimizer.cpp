// attach_optimizer: one update op per parameter, state tensors, the hyper-parameter table. Numbers live in
// the table, not in the graph: groups and schedules change no plan.
#include <functional>

#include "graph/builder.h"
#include "graph/names.h"
#include "graph/nearest.h"
#include "graph/passes/options.h"

namespace onnxddp {
namespace {

struct OptimizerDef {
  std::string name, help;
  double lr;
  /// Columns of the table after lr and step, with PyTorch's defaults; and switches, which shape the graph.
  std::vector<std::pair<std::string, double>> columns;
  std::vector<std::string> flags;
  std::function<void(const OptionReader&)> check;
  std::string op;
  Attrs attrs;
  /// Names of the state tensors of a parameter under these options.
  std::function<std::vector<std::string>(const OptionReader&)> states;
  std::function<void(const OptionReader&, Attrs&)> switches;
};

void check_rates(const OptionReader& o, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) o.require(o.number(key, 0) >= 0, key, "at least 0");
}

void check_sgd(const OptionReader& o) {
  check_rates(o, {"momentum", "weight_decay"});
  const bool fits = o.number("momentum", 0) > 0 && o.number("dampening", 0) == 0;
  o.require(!o.flag("nesterov", false) || fits, "nesterov", "used with momentum > 0 and dampening 0");
}

void check_adam(const OptionReader& o) {
  check_rates(o, {"eps", "weight_decay"});
  for (const char* key : {"beta1", "beta2"}) {
    const double beta = o.number(key, 0.9);
    o.require(beta >= 0 && beta < 1, key, "in [0, 1)");
  }
  o.flag("amsgrad", false);
}

std::vector<std::string> adam_states(const OptionReader& o) {
  std::vector<std::string> out = {"exp_avg", "exp_avg_sq"};
  if (o.flag("amsgrad", false)) out.push_back("max_exp_avg_sq");
  return out;
}

const std::vector<OptimizerDef>& optimizers() {
  static const auto no_switches = [](const OptionReader&, Attrs&) {};
  static const std::vector<OptimizerDef> table = {
      {"sgd",
       "stochastic gradient descent: momentum, dampening, nesterov, weight_decay",
       1e-3,
       {{"momentum", 0}, {"dampening", 0}, {"weight_decay", 0}},
       {"nesterov"},
       check_sgd,
       "SgdUpdate",
       {},
       [](const OptionReader& o) {
         return o.number("momentum", 0) != 0 ? std::vector<std::string>{"velocity"}
                                             : std::vector<std::string>{};
       },
       [](const OptionReader& o, Attrs& attrs) {
         attrs["nesterov"] = std::int64_t{o.flag("nesterov", false) ? 1 : 0};
       }},
      {"adam",
       "Adam (Kingma, Ba 2015); weight_decay is L2",
       1e-3,
       {{"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"weight_decay", 0}},
       {"amsgrad"},
       check_adam,
       "AdamUpdate",
       {},
       adam_states,
       no_switches},
      {"adamw",
       "AdamW (Loshchilov, Hutter 2019): decoupled weight decay",
       1e-3,
       {{"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"weight_decay", 0.01}},
       {"amsgrad"},
       check_adam,
       "AdamUpdate",
       {{"decoupled", std::int64_t{1}}},
       adam_states,
       no_switches},
  };
  return table;
}

const OptimizerDef& find_optimizer(const std::string& name) {
  std::vector<std::string> names;
  for (const OptimizerDef& def : optimizers()) {
    if (def.name == name) return def;
    names.push_back(def.name);
  }
  throw usage_error(cat("there is no optimizer '", name, "'", did_you_mean(name, names)))
      .hint("optimizers: sgd, adam, adamw");
}

OptionReader reader(const OptimizerSpec& spec) { return {cat("--optimizer ", spec.name), spec.options}; }

}  // namespace

std::vector<std::string> hyper_columns(const OptimizerSpec& spec) {
  std::vector<std::string> out = {"lr", "step"};
  for (const auto& [name, value] : find_optimizer(spec.name).columns) out.push_back(name);
  return out;
}

std::vector<double> hyper_defaults(const OptimizerSpec& spec) {
  const OptimizerDef& def = find_optimizer(spec.name);
  const OptionReader options = reader(spec);
  std::vector<std::string> known = def.flags;
  for (const auto& [name, value] : def.columns) known.push_back(name);
  options.only(known);
  def.check(options);
  std::vector<double> out;
  for (const auto& [name, value] : def.columns) out.push_back(options.number(name, value));
  return out;
}

double default_lr(const OptimizerSpec& spec) { return find_optimizer(spec.name).lr; }

void attach_optimizer(Graph& graph, const OptimizerSpec& spec) {
  const OptimizerDef& def = find_optimizer(spec.name);
  const std::size_t columns = 2 + hyper_defaults(spec).size();  // also checks the options
  const OptionReader options = reader(spec);
  const TensorType table_type{DType::f64, {static_cast<std::int64_t>(columns)}};
  const auto grads = gradients(graph);
  if (grads.empty()) return;
  claim_name(graph, "optimizer.group0");
  const ValueId table = graph.add_param("optimizer.group0", table_type, Kind::state);
  Builder builder(graph);
  Attrs attrs = def.attrs;
  def.switches(options, attrs);
  for (const auto& [param, gradient] : grads) {
    const std::string name = graph.value(param).name;
    const TensorType type = graph.value(param).type;
    std::vector<ValueId> inputs = {param, gradient, table};
    std::vector<ValueId> targets = {param};
    std::vector<std::string> names = {graph.unique_name(name + ".next")};
    for (const std::string& state : def.states(options)) {
      const ValueId id = graph.add_param(cat(name, ".", state), type, Kind::state);
      inputs.push_back(id);
      targets.push_back(id);
      names.push_back(graph.unique_name(graph.value(id).name + ".next"));
    }
    const std::vector<ValueId> next = builder.emit(def.op, inputs, attrs, names, names.size());
    for (std::size_t i = 0; i < targets.size(); ++i) graph.updates.push_back({targets[i], next[i]});
    std::erase_if(graph.outputs, [&](const Output& o) { return o.name == name + ".grad"; });
  }
}

std::vector<std::pair<std::string, std::string>> optimizer_names() {
  std::vector<std::pair<std::string, std::string>> out;
  for (const OptimizerDef& def : optimizers()) out.emplace_back(def.name, def.help);
  return out;
}

}  // namespace onnxddp

// onnx-ddp show
#include <algorithm>
#include <cstdio>

#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/cuda/loader.h"
#include "executor/plan/plan.h"
#include "executor/train/setup.h"
#include "graph/nearest.h"
#include "graph/text.h"
#include "importer/checkpoint.h"

namespace onnxddp {
namespace {

std::string quoted_label(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

/// Graphviz: nodes are ops, edges values with their types.
std::string to_dot(const Graph& graph) {
  std::string out = "digraph " + quoted_label(graph.name) + " {\n  node [shape=box];\n";
  const auto source = [&](ValueId id) {
    const Value& value = graph.value(id);
    return value.producer ? cat("n", value.producer.index) : cat("v", id.index);
  };
  const auto leaf = [&](ValueId id) {
    const Value& value = graph.value(id);
    out += cat("  v", id.index, " [shape=ellipse, label=",
               quoted_label(cat(kind_name(value.kind), " ", value.name, ": ", value.type)), "];\n");
  };
  for (const ValueId id : graph.inputs) leaf(id);
  for (const ValueId id : graph.params) leaf(id);
  for (const ValueId id : graph.constants) leaf(id);
  for (const NodeId id : graph.order) {
    const Node& node = graph.node(id);
    out += cat("  n", id.index, " [label=", quoted_label(node.op->name), "];\n");
    for (const ValueId input : node.inputs)
      if (input)
        out += cat("  ", source(input), " -> n", id.index,
                   " [label=", quoted_label(cat(graph.value(input).name, ": ", graph.value(input).type)),
                   "];\n");
  }
  for (const Update& update : graph.updates)
    out += cat("  ", source(update.next), " -> v", update.param.index, " [style=dashed, label=update];\n");
  for (std::size_t i = 0; i < graph.outputs.size(); ++i) {
    out += cat("  o", i, " [shape=ellipse, label=", quoted_label("output " + graph.outputs[i].name), "];\n");
    out += cat("  ", source(graph.outputs[i].value), " -> o", i, ";\n");
  }
  return out + "}\n";
}

/// Ends with a newline, and stdout's failure is found by main.
void emit(const Options& options, const std::string& text) {
  if (!options.output.empty()) {
    replace_file(real_file_system(), options.output, text);
    return;
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (!text.empty() && text.back() != '\n' && options.format != "onnx") std::fputc('\n', stdout);
  std::fflush(stdout);
}

/// Settles the target for stages behind the loss, from data where there is some; returns symbols that rows
/// settle.
DimBindings settle(const ImportedModel& model, const Options& o, ProgramOptions& program) {
  std::vector<std::string> notes;
  DimBindings dims;
  std::vector<std::filesystem::path> files(o.data.begin(), o.data.end());
  std::error_code error;
  const std::filesystem::path neighbour = std::filesystem::path(o.model).replace_extension(".npz");
  if (files.empty() && std::filesystem::exists(neighbour, error)) files.push_back(neighbour);
  if (files.empty()) {
    assume_target(model, o, program, notes);
  } else {
    dims = settle_target(model, *open_dataset(files), o, file_list(files), program, notes).dims;
  }
  for (const std::string& note : notes) say("note     " + note);
  return dims;
}

std::string plan_text(Graph graph, const ImportedModel& model, const Options& o, DimBindings dims) {
  if (!fixed_batch(model)) dims[model.batch_symbol] = o.batch_size.value_or(32);
  bind_dims(graph, dims);
  if (const std::vector<std::string> open = free_symbols(graph); !open.empty())
    throw Error(cat("the plan needs the size of dimension '", open.front(), "'"))
        .hint(cat("--dim ", open.front(), "=SIZE, or --data"));
  StateLayout layout;
  Plan plan = make_plan(graph, *make_device(o.device, 1), layout);
  plan.dims = dims;
  return dump(plan);
}

}  // namespace

int run_show(CommandLine& line) {
  const Options& o = line.options;
  std::vector<std::string> stages = pipeline_stages();
  stages.emplace_back("plan");
  if (std::find(stages.begin(), stages.end(), o.stage) == stages.end()) {
    std::string list;
    for (const std::string& stage : stages) list += (list.empty() ? "" : ", ") + stage;
    throw usage_error(cat("--stage: there is no stage '", o.stage, "'", did_you_mean(o.stage, stages)))
        .hint("stages: " + list);
  }
  const bool plan = o.stage == "plan";
  if (plan && o.format != "text") throw usage_error("--stage plan has only --format text");
  const ImportedModel model = import_onnx(load_onnx(o.model), import_options(o, true));
  ProgramOptions program = program_options(o, static_cast<int>(o.ranks));
  DimBindings dims;
  Graph graph = model.graph;
  if (o.stage != "import" && o.stage != "canonicalise") dims = settle(model, o, program);
  if (o.stage != "import")
    graph = training_graph(model, program, plan ? std::string_view() : std::string_view(o.stage));
  const bool local = std::any_of(graph.order.begin(), graph.order.end(),
                                 [&](NodeId id) { return graph.node(id).op->name == "BatchStats"; });
  if (o.ranks > 1 && local && !o.sync_bn)
    say("note     batch norm uses each rank's own statistics; --sync-bn adds the collectives that join them");
  if (plan)
    emit(o, plan_text(std::move(graph), model, o, dims));
  else if (o.format == "dot")
    emit(o, to_dot(graph));
  else if (o.format == "onnx")
    emit(o, graph_to_onnx(graph, model.values));
  else
    emit(o, dump(graph));
  return kExitDone;
}

}  // namespace onnxddp

#include "executor/train/setup.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "executor/kernel.h"
#include "executor/train/run_folder.h"

namespace onnxddp {
namespace {

constexpr std::int64_t kDefaultBatch = 32, kDefaultEpochs = 10;

/// The tensor that the loss reads; its absence is reported by attach_loss.
const Value* loss_value(const Graph& graph, const std::string& name) {
  for (const Output& output : graph.outputs)
    if (name.empty() || output.name == name) return &graph.value(output.value);
  const ValueId id = graph.find(name);
  return id ? &graph.value(id) : nullptr;
}

bool is_scalar_loss(const Graph& graph, const Options& options) {
  const Value* value = loss_value(graph, options.loss_input);
  return value != nullptr && numel(value->type.shape) == Dim(1);
}

/// The type of a target column: the batch's dimension, then the rows.
TensorType target_type(const ImportedModel& model, DType dtype, const Ints& rows) {
  Shape shape = to_shape(rows);
  const std::optional<std::int64_t> fixed = fixed_batch(model);
  shape.insert(shape.begin(), fixed ? Dim(*fixed) : Dim::symbol(model.batch_symbol));
  return {dtype, shape};
}

void check_classes(const ImportedModel& model, const Dataset& data, std::size_t array, const Column& column,
                   const ProgramOptions& program, const std::string& where, const DimBindings& dims) {
  const Value* value = loss_value(model.graph, program.loss_input);
  if (value == nullptr || column.dtype != DType::i64 || is_float(data.arrays()[array].dtype)) return;
  const std::int64_t axis = find_class_axis(value->type.shape, column.row_shape, program.loss_options, dims);
  if (axis < 0 || !value->type.shape[static_cast<std::size_t>(axis)].is_constant()) return;
  std::optional<std::int64_t> ignore;
  if (const auto option = program.loss_options.find("ignore_index"); option != program.loss_options.end())
    ignore = std::strtoll(option->second.c_str(), nullptr, 10);
  check_labels(data, array, value->type.shape[static_cast<std::size_t>(axis)].value(), ignore, where);
}

std::string data_note(const ArrayInfo& info, const Column& column) {
  const std::string text = conversion(info, column);
  return text.empty() ? "" : cat("data: ", info.name, " ", text);
}

/// Splits off the rows to be held out: the last of a random order that depends on the seed only.
std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> hold_out(std::int64_t size, double fraction,
                                                                         std::int64_t seed) {
  const auto held = static_cast<std::int64_t>(std::llround(static_cast<double>(size) * fraction));
  if (fraction >= 1 || held < 1 || held >= size)
    throw usage_error(cat("--eval-fraction ", number_str(fraction), " of ", size,
                          " rows leaves nothing to train on or nothing to evaluate"));
  std::vector<std::int64_t> order = torch_randperm(size, static_cast<std::uint64_t>(seed));
  std::vector<std::int64_t> train(order.begin(), order.end() - held), eval(order.end() - held, order.end());
  std::sort(train.begin(), train.end());
  std::sort(eval.begin(), eval.end());
  return {train, eval};
}

template <class T>
bool is_finite(const HostTensor& tensor) {
  const T* values = tensor.data<T>();
  return std::all_of(values, values + tensor.numel(), [](T v) { return std::isfinite(v); });
}

std::vector<Column> all_columns(const Target& target, const ProgramOptions& program) {
  std::vector<Column> columns = target.inputs;
  if (!target.column) return columns;
  columns.push_back(*target.column);
  columns.back().input = program.target_name;
  return columns;
}

/// The batch size by option, model and data.
std::int64_t choose_batch(const TrainSetup& setup, std::int64_t share, int ranks) {
  const std::optional<std::int64_t> fixed = fixed_batch(setup.model), asked = setup.options.batch_size;
  if (share < 1)
    throw Error(cat("too few rows for ", ranks, " ranks")).hint("fewer ranks, or without --drop-last");
  if (asked && *asked > share)
    throw usage_error(
        cat("--batch-size ", *asked, " is larger than a rank's share of the data: ", share, " rows"))
        .at(cat(setup.data->size(), " rows, ", ranks, ranks == 1 ? " rank" : " ranks"))
        .hint(cat("--batch-size ", share, " or less, or leave it out"));
  if (!fixed) return asked.value_or(std::min(kDefaultBatch, share));
  if (asked && *asked != *fixed)
    throw usage_error(cat("--batch-size ", *asked, ": the model's batch is fixed at ", *fixed))
        .hint("export it with a dynamic batch dimension");
  if (*fixed > share)
    throw Error(cat("the model's batch is fixed at ", *fixed, ", but a rank has only ", share, " rows"));
  return *fixed;
}

SamplerOptions sampler_options(const Options& options, std::int64_t size, int rank, int ranks,
                               std::int64_t batch) {
  SamplerOptions out;
  out.kind = options.sampler;
  out.size = size;
  out.rank = rank;
  out.world_size = ranks;
  out.seed = static_cast<std::uint64_t>(options.seed);
  out.shuffle = !options.no_shuffle;
  out.drop_last = options.drop_last;
  out.drop_short_batch = options.drop_short_batch;
  out.batch_size = batch;
  return out;
}

/// Batch norm over one value per channel has no variance: an error now, not NaN later.
void check_batch_norms(const TrainSetup& setup, int ranks) {
  const std::int64_t batch = setup.sampler->options().batch_size, rows = setup.sampler->rows_per_rank();
  std::vector<std::int64_t> sizes = {batch};
  if (rows % batch != 0 && !setup.options.drop_short_batch) sizes.push_back(rows % batch);
  for (const NodeId id : setup.programs.step.order) {
    const Node& node = setup.programs.step.node(id);
    if (node.op->name != "BatchStats") continue;
    const Value& x = setup.programs.step.value(node.inputs[0]);
    for (const std::int64_t size : sizes) {
      DimBindings dims = setup.dims;
      dims[setup.model.batch_symbol] = size;
      const Shape shape = bind_shape(x.type.shape, dims);
      if (!is_static(shape)) continue;
      const Ints bound = static_shape(shape);
      const std::int64_t values = numel(bound) / std::max<std::int64_t>(1, bound[1]);
      if (values * (setup.options.sync_bn ? ranks : 1) > 1) continue;
      throw Error("batch norm would see one value per channel, which has no variance")
          .at(cat(x.name, ": ", x.type.dtype == DType::f64 ? "f64" : "f32", shape_str(bound), ", a batch of ",
                  size, size == 1 ? " row" : " rows"))
          .in(node.origin)
          .hint(size == batch
                    ? "a larger --batch-size, --sync-bn, or --bn eval"
                    : "--drop-short-batch leaves the short last batch out; --sync-bn joins the ranks'");
    }
  }
}

void settle_length(TrainSetup& setup) {
  const std::int64_t batches = setup.sampler->batches_per_epoch();
  setup.steps_per_epoch = (batches + setup.options.accumulate - 1) / setup.options.accumulate;
  if (setup.steps_per_epoch < 1)
    throw Error("an epoch has no batch: the only one is short, and --drop-short-batch leaves it out")
        .hint("a smaller --batch-size");
  if (!setup.options.steps && !setup.options.epochs) setup.options.epochs = kDefaultEpochs;
  setup.total_steps =
      setup.options.steps ? *setup.options.steps : *setup.options.epochs * setup.steps_per_epoch;
}

/// The loss as --loss takes it.
std::string loss_text(const ProgramOptions& program) {
  std::string text = program.loss;
  for (const auto& [key, value] : program.loss_options)
    text += cat(text.find(':') == std::string::npos ? ":" : ",", key, "=", value);
  return text;
}

/// The choices that data and model made, as options. A target's name only where all data has it: with the
/// same options the run can be made again.
void settle_options(TrainSetup& setup, const std::vector<std::filesystem::path>& files,
                    const Target& target) {
  Options& o = setup.options;
  o.data.clear();
  for (const std::filesystem::path& file : files) o.data.push_back(file.string());
  o.loss = loss_text(setup.program_options);
  if (!target.column) return;
  const std::string& name = setup.data->data().arrays()[target.column->array].name;
  const auto named = [&](const ArrayInfo& info) { return info.name == name; };
  if (!setup.eval_data ||
      std::any_of(setup.eval_data->data().arrays().begin(), setup.eval_data->data().arrays().end(), named))
    o.target = name;
}

void open_training_data(TrainSetup& setup, const std::string& where, std::shared_ptr<const Dataset> data,
                        const Target& target) {
  const std::vector<Column> columns = all_columns(target, setup.program_options);
  setup.data_text = cat(where, ": ", data->size(), " rows");
  if (setup.options.eval_fraction > 0) {
    auto [train, eval] = hold_out(data->size(), setup.options.eval_fraction, setup.options.seed);
    setup.data_text = cat(where, ": ", train.size(), " rows to train, ", eval.size(), " held out");
    setup.data = std::make_unique<BatchSource>(data, columns, std::move(train));
    setup.eval_data = std::make_unique<BatchSource>(data, columns, std::move(eval));
    return;
  }
  setup.data = std::make_unique<BatchSource>(data, columns);
  if (setup.options.eval_data.empty()) return;
  const std::vector<std::filesystem::path> files(setup.options.eval_data.begin(),
                                                 setup.options.eval_data.end());
  std::shared_ptr<const Dataset> eval = open_dataset(files);
  ProgramOptions same = setup.program_options;
  std::vector<std::string> unsaid;
  Options options = setup.options;
  options.loss = loss_text(same);
  const Target eval_target = settle_target(setup.model, *eval, options, file_list(files), same, unsaid);
  if (same.target_type != setup.program_options.target_type)
    throw Error("the evaluation data's target differs from the training data's")
        .at(cat(same.target_type, " and ", setup.program_options.target_type))
        .in(file_list(files));
  setup.eval_data = std::make_unique<BatchSource>(eval, all_columns(eval_target, setup.program_options));
  setup.data_text += cat("; evaluation ", file_list(files), ": ", eval->size(), " rows");
}

}  // namespace

void check_weights(const ImportedModel& model, const std::string& file) {
  for (const auto& [name, value] : model.values) {
    const bool finite = value.dtype() == DType::f32   ? is_finite<float>(value)
                        : value.dtype() == DType::f64 ? is_finite<double>(value)
                                                      : true;
    const ValueId id = model.graph.find(name);
    if (finite || !id || model.graph.value(id).kind != Kind::param) continue;
    throw Error(cat("the model's parameter '", name, "' holds NaN or infinity, so no loss can be finite"))
        .at(value.type().str())
        .in(file)
        .hint("export a model with whole weights; --on-nan ignore trains it all the same");
  }
}

ImportOptions import_options(const Options& options, bool training) {
  ImportOptions out;
  out.train = options.train;
  out.freeze = options.freeze;
  out.bn = options.bn;
  out.bn_unbiased = options.bn_running_var == "torch";
  for (const std::string& text : options.dim) {
    const auto [name, value] = parse_assignment("--dim", text);
    out.dims[name] = std::strtoll(value.c_str(), nullptr, 10);
  }
  for (const std::string& text : options.input) out.inputs.insert(parse_assignment("--input", text));
  out.training = training;
  return out;
}

ProgramOptions program_options(const Options& options, int ranks) {
  ProgramOptions out;
  if (!options.loss.empty()) {
    Spec loss = parse_spec("--loss", options.loss);
    out.loss = loss.name;
    out.loss_options = loss.options;
  }
  out.loss_input = options.loss_input;
  out.accumulate = static_cast<int>(options.accumulate);
  out.distribute.ranks = ranks;
  out.distribute.sync_batch_norm = options.sync_bn;
  out.distribute.bucket_policy = options.bucket_policy;
  out.distribute.bucket_mb = options.bucket_mb;
  out.guard.clip_norm = options.clip_norm;
  out.guard.clip_value = options.clip_value;
  Spec optimizer = parse_spec("--optimizer", options.optimizer);
  out.optimizer.name = optimizer.name;
  out.optimizer.options = optimizer.options;
  return out;
}

std::optional<std::int64_t> fixed_batch(const ImportedModel& model) {
  for (const ValueId id : model.graph.inputs) {
    const Shape& shape = model.graph.value(id).type.shape;
    if (shape.empty()) continue;
    if (!shape[0].is_constant()) return std::nullopt;
    return shape[0].value();
  }
  return std::nullopt;
}

ValueCounts count_values(const ImportedModel& model, const std::vector<std::string>& unused) {
  ValueCounts out;
  for (const TensorRole& role : model.roles) {
    const bool parameter = role.role == Role::parameter;
    const Dim count = numel(role.type.shape);
    if (!(parameter || role.role == Role::buffer || role.role == Role::frozen) ||
        !is_float(role.type.dtype) || !count.is_constant())
      continue;
    out.all += count.value();
    if (parameter && std::find(unused.begin(), unused.end(), role.name) == unused.end())
      out.trained += count.value();
  }
  return out;
}

Target settle_target(const ImportedModel& model, const Dataset& data, const Options& options,
                     const std::string& where, ProgramOptions& program, std::vector<std::string>& notes) {
  const bool graph_loss = program.loss == "graph" || (program.loss.empty() && options.target.empty() &&
                                                      is_scalar_loss(model.graph, options));
  const ArrayMatch match = match_arrays(model.graph, data, options.target, !graph_loss, where);
  for (const Column& column : match.inputs)
    if (const std::string note = data_note(data.arrays()[column.array], column); !note.empty())
      notes.push_back(note);
  Target out{std::nullopt, match.dims, match.inputs};
  program.target_name = model.graph.unique_name("target");
  if (graph_loss && !match.target) {
    program.loss = "graph";
    return out;
  }
  const ArrayInfo& info = data.arrays()[*match.target];
  if (program.loss.empty()) {
    const TargetScan scan = scan_target(data, *match.target);
    const DType dtype = info.dtype == DType::boolean ? DType::i64 : info.dtype;
    program.target_is_binary = scan.binary;
    program.target_is_one_hot = scan.one_hot;
    program.loss = default_loss(model.graph, program.loss_input, target_type(model, dtype, info.row_shape),
                                scan.binary, scan.one_hot, &notes);
  }
  const Value* read = loss_value(model.graph, program.loss_input);
  if (program.loss == "graph" || read == nullptr) return out;
  Column column =
      target_column(info, *match.target, program.loss, program.loss_options, read->type, match.dims);
  column.input = program.target_name;
  try {
    if (const std::string note = data_note(info, column); !note.empty()) notes.push_back(note);
  } catch (Error& error) {
    error.add_in(where);
    throw;
  }
  program.target_type = target_type(model, column.dtype, column.row_shape);
  if (program.loss == "cross_entropy")
    check_classes(model, data, *match.target, column, program, where, match.dims);
  out.column = column;
  return out;
}

void assume_target(const ImportedModel& model, const Options& options, ProgramOptions& program,
                   std::vector<std::string>& notes) {
  program.target_name = model.graph.unique_name("target");
  const Value* read = loss_value(model.graph, options.loss_input);
  if (read == nullptr || program.loss == "graph") return;
  const Shape& shape = read->type.shape;
  if (program.loss.empty() && shape.empty()) {
    program.loss = "graph";
    return;
  }
  const bool classes = shape.size() > 1 && shape.back().is_constant() && shape.back().value() >= 2;
  if (program.loss.empty()) program.loss = classes ? "cross_entropy" : "mse";
  program.target_type = read->type;
  if (program.loss == "cross_entropy" && shape.size() > 1) {
    program.target_type.dtype = DType::i64;
    const auto axis = program.loss_options.find("axis");
    std::int64_t at = shape.size() == 2                    ? 1
                      : axis == program.loss_options.end() ? 1
                                                           : std::strtoll(axis->second.c_str(), nullptr, 10);
    at = normal_axis(at, shape.size());
    program.target_type.shape.erase(program.target_type.shape.begin() + at);
  }
  notes.push_back(
      cat("no data: a target ", program.target_type, " and the loss ", program.loss, " are assumed"));
}

TrainSetup prepare_training(const Options& options, int rank, int ranks) {
  TrainSetup setup;
  setup.options = options;
  const ModelSource source = open_model(options);
  const std::vector<std::filesystem::path> files = data_files(options.data, options.model);
  setup.model = import_onnx(source.file, import_options(options, true));
  setup.eval_model = import_onnx(source.file, import_options(options, false));
  for (auto& [name, value] : setup.model.values)
    if (const auto found = source.values.find(name); found != source.values.end()) value = found->second;
  if (options.on_nan != "ignore") check_weights(setup.model, options.model);
  setup.notes = setup.model.notes;
  if (!source.note.empty()) setup.notes.push_back(source.note);
  setup.warnings = setup.model.warnings;
  std::shared_ptr<const Dataset> data = open_dataset(files);
  const std::string where = file_list(files);
  setup.program_options = program_options(options, ranks);
  const Target target = settle_target(setup.model, *data, options, where, setup.program_options, setup.notes);
  setup.dims = target.dims;
  setup.programs = build_programs(setup.model, setup.eval_model, setup.program_options);
  for (const std::string& note : setup.programs.loss.notes) setup.notes.push_back(note);
  open_training_data(setup, where, data, target);
  settle_options(setup, files, target);
  if (!setup.options.lr) setup.options.lr = default_lr(setup.program_options.optimizer);
  SamplerOptions sampler = sampler_options(setup.options, setup.data->size(), rank, ranks, 1);
  sampler.drop_short_batch = false;
  sampler.batch_size = choose_batch(setup, Sampler(sampler).rows_per_rank(), ranks);
  setup.options.batch_size = sampler.batch_size;
  if (fixed_batch(setup.model) && !setup.options.drop_short_batch) {
    setup.options.drop_short_batch = true;
    setup.notes.push_back(
        cat("the model's batch is fixed at ", sampler.batch_size, ": short batches are left out"));
  }
  sampler.drop_short_batch = setup.options.drop_short_batch;
  setup.sampler = std::make_unique<Sampler>(sampler);
  settle_length(setup);
  check_batch_norms(setup, ranks);
  return setup;
}

EvalSetup prepare_evaluation(const Options& options) {
  EvalSetup setup;
  setup.model = import_onnx(load_onnx(options.model), import_options(options, false));
  const std::vector<std::filesystem::path> files = data_files(options.data, options.model);
  std::shared_ptr<const Dataset> data = open_dataset(files);
  ProgramOptions program = program_options(options, 1);
  const Target target = settle_target(setup.model, *data, options, file_list(files), program, setup.notes);
  setup.dims = target.dims;
  setup.evaluate = inference_graph(setup.model);
  setup.loss = attach_loss(setup.evaluate, program.loss, program.loss_options, program.loss_input,
                           program.target_name, program.target_type);
  simplify(setup.evaluate, evaluate_constant);
  setup.data = std::make_unique<BatchSource>(data, all_columns(target, program));
  setup.batch_size = options.batch_size.value_or(fixed_batch(setup.model).value_or(kDefaultBatch));
  return setup;
}

double static_count(const LossInfo& loss, const std::string& batch_symbol, DimBindings dims,
                    std::int64_t rows) {
  dims[batch_symbol] = rows;
  return static_cast<double>(loss.count.bind(dims).value());
}

}  // namespace onnxddp

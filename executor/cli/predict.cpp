// onnx-ddp predict
#include <numeric>

#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/cuda/loader.h"
#include "executor/train/setup.h"
#include "executor/train/stepper.h"
#include "executor/train/trainer.h"

namespace onnxddp {
namespace {

/// Appends the rows of a batch's outputs to those before.
void append(HostTensor& all, const HostTensor& rows, std::int64_t total, std::int64_t begin,
            std::int64_t batch, const std::string& name) {
  if (rows.shape().empty() || rows.shape()[0] != batch)
    throw Error(cat("output '", name, "' has no batch dimension, so predict cannot join its batches"));
  Ints shape = rows.shape();
  shape[0] = total;
  if (begin == 0) all = HostTensor(rows.dtype(), shape);
  if (all.shape() != shape)
    throw Error(cat("output '", name, "' has another shape in each batch, so predict cannot join them"));
  const std::size_t row_bytes = batch > 0 ? rows.bytes() / static_cast<std::size_t>(batch) : 0;
  if (rows.bytes() > 0)
    std::memcpy(all.mutable_raw() + static_cast<std::size_t>(begin) * row_bytes, rows.raw(), rows.bytes());
}

}  // namespace

int run_predict(CommandLine& line) {
  const Options options = resolve_run(line, {"input", "dim"});
  const std::filesystem::path output = options.output;
  if (output.extension() != ".npz")
    throw usage_error("predict needs --output FILE.npz (other kinds are not in this version)");
  const ImportedModel model = import_onnx(load_onnx(options.model), import_options(options, false));
  const std::vector<std::filesystem::path> files = data_files(options.data, options.model);
  const std::shared_ptr<const Dataset> data = open_dataset(files);
  const BatchSource source(data, match_arrays(model.graph, *data, "", false, file_list(files)).inputs);
  const std::unique_ptr<Device> device = make_device(options.device, thread_count(options, 1));
  RankGroup alone(std::nullopt, std::chrono::seconds(60));
  Session session(*device, alone.communicator());
  session.add_program("predict", inference_graph(model));
  set_values(session, model.values);
  const std::int64_t batch = options.batch_size.value_or(fixed_batch(model).value_or(32));
  std::map<std::string, HostTensor> outputs;
  std::vector<std::int64_t> rows;
  for (std::int64_t begin = 0; begin < source.size(); begin += batch) {
    rows.resize(static_cast<std::size_t>(std::min(batch, source.size() - begin)));
    std::iota(rows.begin(), rows.end(), begin);
    for (const auto& [name, tensor] : session.run("predict", source.batch(rows)))
      append(outputs[name], tensor, source.size(), begin, static_cast<std::int64_t>(rows.size()), name);
  }
  write_npz(output, {outputs.begin(), outputs.end()});
  say(cat(source.size(), " rows -> ", output.string()));
  return kExitDone;
}

}  // namespace onnxddp

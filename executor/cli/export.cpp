// onnx-ddp export
#include "executor/cli/commands.h"
#include "executor/cli/run_command.h"
#include "executor/train/run_folder.h"
#include "executor/train/setup.h"

namespace onnxddp {

int run_export(CommandLine& line) {
  const Options options = resolve_run(line, {"input", "dim"});
  if (options.output.empty()) throw usage_error("export needs -o OUT.onnx or OUT.npz");
  const std::filesystem::path output = options.output;
  const std::string kind = output.extension().string();
  if (kind == ".safetensors")
    throw usage_error("export: .safetensors is not in this version").hint("-o OUT.onnx or OUT.npz");
  if (kind != ".onnx" && kind != ".npz")
    throw usage_error(cat("export: unknown kind of file '", kind, "'")).hint("-o OUT.onnx or OUT.npz");
  const ImportedModel model = import_onnx(load_onnx(options.model), import_options(options, false));
  if (kind == ".npz") {
    write_npz(output, {model.values.begin(), model.values.end()});
  } else {
    replace_file(real_file_system(), output, save_trained(*model.source, model.values));
  }
  say(cat(options.model, " -> ", output.string()));
  return kExitDone;
}

}  // namespace onnxddp

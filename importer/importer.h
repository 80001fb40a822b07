// ModelProto <-> Graph, without naming protobuf: the face of importer/onnx.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

/// What a tensor of the file is to training (design A2 "trainable").
enum class Role : std::uint8_t { parameter, buffer, frozen, constant, input, output };
std::string_view role_name(Role role);

struct TensorRole {
  std::string name;  // the tensor's name in the file (an initializer, or a Constant's output)
  TensorType type;
  Role role;
  std::string
      reason;  // "W of Conv 'conv1'", "running mean of BatchNormalization 'bn1'", "no path to an output", …
};

struct ImportOptions {
  std::string train;                          // RE2 full-match pattern over names: force trainable
  std::string freeze;                         // RE2 pattern: never trained
  std::string bn = "train";                   // train | eval | as-file
  bool bn_unbiased = true;                    // --bn-running-var torch (unbiased) | onnx (population)
  std::map<std::string, std::int64_t> dims;   // --dim NAME=VALUE
  std::map<std::string, std::string> inputs;  // --input NAME=VALUE
  bool training = true;  // false (eval, predict): dropout off, batch norm with running statistics
};

/// The file as bytes and parsed model: kept to write the trained model back.
class OnnxModel;  // holds the ModelProto

struct ImportedModel {
  Graph graph{"model"};  // stage `import`
  std::map<std::string, HostTensor>
      values;  // initial values of params and states, by value name in the graph
  std::vector<TensorRole> roles;
  std::vector<std::string> notes;     // said in banner and check: "batch dimension 1 made symbolic (N)"
  std::vector<std::string> warnings;  // "3 batch norms were folded into Conv …"
  std::shared_ptr<const OnnxModel> source;
  std::string batch_symbol = "N";
  std::map<std::string, std::string> metadata;
};

/// Reads and checks a file. Throws Error (place: file, node, opset) for everything a file can have wrong:
/// unreadable, empty, not protobuf, checker failures, cycles, unknown ops or domains (all of them named at
/// once), recursive functions, external data that is missing, escapes the folder or has the wrong length.
std::shared_ptr<const OnnxModel> load_onnx(const std::filesystem::path& file);
ImportedModel import_onnx(std::shared_ptr<const OnnxModel> model, const ImportOptions& options);
/// From ONNX's text syntax (OnnxParser), for tests.
std::shared_ptr<const OnnxModel> parse_onnx_text(const std::string& text);
/// From serialized bytes (checkpoint's source.onnx).
std::shared_ptr<const OnnxModel> load_onnx_bytes(const std::string& bytes, const std::string& name);

/// Names of ops in the model that are unknown, each as "domain::Op (node 'x', opset n)".
std::vector<std::string> unknown_ops(const OnnxModel& model);
/// Every loss of training form that the file shows (fixed batch, folded batch norms, …), for `check`.
std::vector<std::string> training_form_losses(const OnnxModel& model);

/// The user's own ModelProto with new values in place (initializers and Constants, by the names of
/// ImportedModel.values): batch norm training_mode=0 with one output, dropout off; names, functions,
/// metadata, opset unchanged. Serialized deterministically. Passes the checker (full_check).
std::string save_trained(const OnnxModel& source, const std::map<std::string, HostTensor>& values);
struct SavedModel {
  std::string model;
  std::string data;  // contents of the file of external data beside it; empty if there is none
};
/// The same, with initializers in the file `data_file` beside the model when the model would exceed
/// `inline_limit` bytes.
SavedModel save_trained(const OnnxModel& source, const std::map<std::string, HostTensor>& values,
                        const std::string& data_file, std::uint64_t inline_limit = std::uint64_t{3} << 29);
/// The original model without payloads of initializers (checkpoint's source.onnx).
std::string source_without_payloads(const OnnxModel& source);
/// The IR as ONNX at our opset, internal ops in the declared domain "onnxddp"; for `show --format onnx` and
/// tests.
std::string graph_to_onnx(const Graph& graph, const std::map<std::string, HostTensor>& values);

/// Named tensors as an ONNX file of initializers with string metadata (checkpoint's state.onnx).
std::string tensors_to_onnx(const std::map<std::string, HostTensor>& tensors,
                            const std::map<std::string, std::string>& metadata);
struct TensorFile {
  std::map<std::string, HostTensor> tensors;
  std::map<std::string, std::string> metadata;
};
TensorFile tensors_from_onnx(const std::string& bytes, const std::string& name);

}  // namespace onnxddp

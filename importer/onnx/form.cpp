// What an exporter took away from a model that was made to be trained, as far as the file shows it.
#include <algorithm>

#include "importer/onnx/batch.h"
#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

bool says_folded(const pb::NodeProto& node) {
  return std::any_of(node.metadata_props().begin(), node.metadata_props().end(),
                     [](const pb::StringStringEntryProto& entry) {
                       return entry.key().find("rule_name") != std::string::npos &&
                              entry.value().find("FuseBatchNormIntoConv") != std::string::npos;
                     });
}

/// Convolutions with a bias whose output no batch norm reads.
int biased_convolutions(const Flat& flat) {
  std::set<std::string> normalised;
  for (const FlatNode& node : flat.nodes)
    if (node.is("BatchNormalization")) normalised.insert(node.inputs.at(0));
  return static_cast<int>(std::count_if(flat.nodes.begin(), flat.nodes.end(), [&](const FlatNode& node) {
    return node.is("Conv") && node.inputs.size() > 2 && flat.tensor_index.count(node.inputs[2]) &&
           !normalised.count(node.outputs.at(0));
  }));
}

/// Large float tensors whose name an exporter's constant folding made up, e.g. onnx::MatMul_81: copies of
/// weights.
std::vector<std::string> folded_constants(const Flat& flat) {
  std::vector<std::string> names;
  for (const FileTensor& tensor : flat.tensors) {
    if (!tensor.tensor || !dtype_of_proto(tensor.tensor->data_type()) ||
        !is_float(*dtype_of_proto(tensor.tensor->data_type())))
      continue;
    if (numel(tensor_type(*tensor.tensor).shape) == Dim(1)) continue;
    if (tensor.name.rfind("onnx::", 0) == 0 || tensor.name.find("const_fold_opt__") != std::string::npos)
      names.push_back(tensor.name);
  }
  return names;
}

std::string batch_norm_form(const Flat& flat) {
  int frozen = 0;
  for (const FlatNode& node : flat.nodes) {
    if (!node.is("BatchNormalization")) continue;
    const pb::AttributeProto* mode = find_attribute(*node.proto, "training_mode");
    const auto outputs = std::count_if(node.outputs.begin(), node.outputs.end(),
                                       [](const std::string& name) { return !name.empty(); });
    if (!(mode && mode->i() != 0) && outputs < 2) ++frozen;
  }
  if (frozen == 0) return {};
  return cat(frozen, frozen == 1 ? " batch norm is" : " batch norms are",
             " in inference form: `--bn train`, the default, trains them");
}

}  // namespace

int folded_batch_norms(const pb::ModelProto& model) {
  return static_cast<int>(
      std::count_if(model.graph().node().begin(), model.graph().node().end(), says_folded));
}

std::vector<std::string> training_form_losses(const OnnxModel& model) {
  const Flat flat = flatten(model.proto);
  std::vector<std::string> out;
  if (const auto batch = fixed_batch(model.proto))
    out.push_back(cat("the exporter fixed the batch dimension at ", *batch));
  const int folded = folded_batch_norms(model.proto), biased = biased_convolutions(flat);
  if (folded > 0)
    out.push_back(
        cat(folded, folded == 1 ? " batch norm was" : " batch norms were",
            " folded into Conv (node metadata FuseBatchNormIntoConv): they train as plain convolutions"));
  else if (biased > 0)
    out.push_back(cat(biased, " Conv with a bias and no batch norm behind ", biased == 1 ? "it" : "them",
                      ": if the model had batch norms there, the exporter folded them"));
  const std::vector<std::string> constants = folded_constants(flat);
  if (!constants.empty())
    out.push_back(cat(constants.size(), constants.size() == 1 ? " weight was" : " weights were",
                      " computed by the exporter (", constants[0], constants.size() > 1 ? ", …" : "",
                      "): ties to other weights are lost"));
  if (out.empty()) return out;
  const std::string frozen = batch_norm_form(flat);
  if (!frozen.empty()) out.push_back(frozen);
  const bool dropout = std::any_of(flat.nodes.begin(), flat.nodes.end(),
                                   [](const FlatNode& node) { return node.is("Dropout"); });
  if (!dropout) out.push_back("dropout that an exporter removed cannot be seen in a file");
  out.push_back(
      "this export keeps batch norm, dropout and a free batch size: torch.onnx.export(model.train(), (x,), "
      "f, dynamo=True, optimize=False, "
      "external_data=False, dynamic_shapes=({0: torch.export.Dim(\"N\")},))");
  return out;
}

}  // namespace onnxddp

// Models and named tensors as bytes, always the same ones for the same contents.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <limits>

#include "importer/onnx/proto.h"

namespace onnxddp {

std::string serialize(const pb::ModelProto& model) {
  if (model.ByteSizeLong() > std::numeric_limits<std::int32_t>::max())
    throw Error(cat("the model has ", model.ByteSizeLong(),
                    " bytes, more than the 2 GiB an ONNX file can hold without external data"));
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream out(&stream);
  out.SetSerializationDeterministic(true);
  model.SerializeToCodedStream(&out);
  out.Trim();
  return bytes;
}

std::string tensors_to_onnx(const std::map<std::string, HostTensor>& tensors,
                            const std::map<std::string, std::string>& metadata) {
  pb::ModelProto model;
  model.set_ir_version(8);
  model.set_producer_name("onnx-ddp");
  pb::OperatorSetIdProto* opset = model.add_opset_import();
  opset->set_domain("");
  opset->set_version(17);
  model.mutable_graph()->set_name("tensors");
  for (const auto& [name, value] : tensors) {
    pb::TensorProto* tensor = model.mutable_graph()->add_initializer();
    tensor->set_name(name);
    set_tensor(*tensor, value);
  }
  for (const auto& [key, value] : metadata) {
    pb::StringStringEntryProto* entry = model.add_metadata_props();
    entry->set_key(key);
    entry->set_value(value);
  }
  return serialize(model);
}

TensorFile tensors_from_onnx(const std::string& bytes, const std::string& name) {
  pb::ModelProto model;
  if (bytes.size() > static_cast<std::size_t>(std::numeric_limits<int>::max()) ||
      !model.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || !model.has_graph())
    throw Error(cat(name, " is damaged: it does not hold named tensors")).in(name);
  TensorFile out;
  for (const pb::TensorProto& tensor : model.graph().initializer()) {
    const std::string what = cat("tensor '", tensor.name(), "'");
    try {
      if (tensor.data_location() == pb::TensorProto::EXTERNAL)
        throw Error(cat(what, " lies in another file"));
      check_payload(tensor, what, false);
      if (!out.tensors.emplace(tensor.name(), to_host(tensor, what)).second)
        throw Error(cat(what, " occurs twice"));
    } catch (Error& e) {
      e.add_in(name);
      throw;
    }
  }
  for (const pb::StringStringEntryProto& entry : model.metadata_props())
    out.metadata[entry.key()] = entry.value();
  return out;
}

}  // namespace onnxddp

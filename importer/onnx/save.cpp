// The user's own model with trained values, and the model without its payloads.
#include <algorithm>

#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

using Nodes = google::protobuf::RepeatedPtrField<pb::NodeProto>;
using Infos = google::protobuf::RepeatedPtrField<pb::ValueInfoProto>;

void set_constant(pb::NodeProto& node, const HostTensor& value) {
  for (pb::AttributeProto& a : *node.mutable_attribute()) {
    if (a.name() == "value_float") a.set_f(static_cast<float>(value.as_double(0)));
    if (a.name() == "value_floats")
      for (std::int64_t i = 0; i < value.numel(); ++i)
        a.set_floats(static_cast<int>(i), static_cast<float>(value.as_double(i)));
    if (a.name() != "sparse_value") continue;
    a.set_name("value");  // trained values are dense
    a.set_type(pb::AttributeProto::TENSOR);
    a.clear_sparse_tensor();
    set_tensor(*a.mutable_t(), value);
  }
}

/// Writes the values by name. The pointers that file_tensors gives point into `model`, which is ours to
/// change.
void put_values(pb::ModelProto& model, const std::map<std::string, HostTensor>& values) {
  for (const FileTensor& tensor : file_tensors(model)) {
    const auto found = values.find(tensor.name);
    if (found == values.end()) {
      if (!tensor.has_value())
        throw Error(cat("no value for tensor '", tensor.name, "', whose payload is not kept in this model"));
      continue;
    }
    const std::optional<TensorType> type = tensor.type();
    CHECK(type && static_shape(type->shape) == found->second.shape(), "value of '", tensor.name, "' is ",
          found->second.type());
    const HostTensor value = found->second.cast(type->dtype);
    if (tensor.tensor)
      set_tensor(const_cast<pb::TensorProto&>(*tensor.tensor), value);
    else
      set_constant(const_cast<pb::NodeProto&>(*tensor.constant), value);
  }
}

/// Names that something in a graph or function reads, also from inside subgraphs.
void collect_reads(const Nodes& nodes, std::map<std::string, int>& reads) {
  for (const pb::NodeProto& node : nodes) {
    for (const std::string& input : node.input()) ++reads[input];
    for (const pb::AttributeProto& a : node.attribute()) {
      const auto subgraph = [&](const pb::GraphProto& graph) {
        collect_reads(graph.node(), reads);
        for (const pb::ValueInfoProto& output : graph.output()) ++reads[output.name()];
      };
      if (a.has_g()) subgraph(a.g());
      for (const pb::GraphProto& graph : a.graphs()) subgraph(graph);
    }
  }
}

/// Turns the training form of one graph's or function's nodes into the inference form.
class InferenceForm {
 public:
  InferenceForm(Nodes& nodes, Infos* infos, std::map<std::string, int> reads)
      : nodes_(nodes), infos_(infos), reads_(std::move(reads)) {}

  void run() {
    for (pb::NodeProto& node : nodes_) {
      if (is_standard(node, "BatchNormalization")) batch_norm(node);
      if (is_standard(node, "Dropout") && node.input_size() > 2) dropout(node);
    }
    if (!identities_.empty()) insert_identities();
    remove_unread();
  }

 private:
  void batch_norm(pb::NodeProto& node) {
    for (pb::AttributeProto& a : *node.mutable_attribute())
      if (a.name() == "training_mode") {
        a.clear_ref_attr_name();
        a.set_type(pb::AttributeProto::INT);
        a.set_i(0);
      }
    for (int i = 1; i < node.output_size(); ++i) {
      const std::string& output = node.output(i);
      if (output.empty()) continue;
      if (reads_[output] > 0)
        identities_[&node].emplace_back(node.input(i % 2 == 1 ? 3 : 4),
                                        output);  // mean, var, saved mean, saved var
      else
        drop_info(output);
    }
    while (node.output_size() > 1) node.mutable_output()->RemoveLast();
  }

  /// training_mode is off by default.
  void dropout(pb::NodeProto& node) {
    const std::string mode = node.input(2);
    node.mutable_input()->RemoveLast();
    if (node.input_size() == 2 && node.input(1).empty()) node.mutable_input()->RemoveLast();
    if (!mode.empty() && --reads_[mode] == 0) unread_.insert(mode);
  }

  void drop_info(const std::string& name) {
    if (!infos_) return;
    for (int i = infos_->size(); i-- > 0;)
      if (infos_->Get(i).name() == name) infos_->DeleteSubrange(i, 1);
  }

  /// What read a running statistic behind a batch norm reads the buffer now.
  void insert_identities() {
    Nodes out;
    for (pb::NodeProto& node : nodes_) {
      const auto found = identities_.find(&node);
      *out.Add() = node;
      if (found == identities_.end()) continue;
      for (const auto& [from, to] : found->second) {
        pb::NodeProto* identity = out.Add();
        identity->set_op_type("Identity");
        identity->set_name(to + ".identity");
        identity->add_input(from);
        identity->add_output(to);
      }
    }
    nodes_ = std::move(out);
  }

  void remove_unread() {
    for (int i = nodes_.size(); i-- > 0;) {
      const pb::NodeProto& node = nodes_.Get(i);
      if (!is_standard(node, "Constant") || node.output_size() != 1 || !unread_.count(node.output(0)))
        continue;
      drop_info(node.output(0));
      nodes_.DeleteSubrange(i, 1);
    }
  }

  Nodes& nodes_;
  Infos* infos_;
  std::map<std::string, int> reads_;
  std::map<const pb::NodeProto*, std::vector<std::pair<std::string, std::string>>> identities_;
  std::set<std::string> unread_;
};

void inference_form(pb::ModelProto& model) {
  pb::GraphProto& graph = *model.mutable_graph();
  std::map<std::string, int> reads;
  collect_reads(graph.node(), reads);
  for (const pb::ValueInfoProto& output : graph.output()) ++reads[output.name()];
  InferenceForm(*graph.mutable_node(), graph.mutable_value_info(), reads).run();
  for (pb::FunctionProto& function : *model.mutable_functions()) {
    reads.clear();
    collect_reads(function.node(), reads);
    for (const std::string& output : function.output()) ++reads[output];
    InferenceForm(*function.mutable_node(), function.mutable_value_info(), reads).run();
  }
}

void remove_mark(pb::ModelProto& model) {
  for (int i = model.metadata_props_size(); i-- > 0;)
    if (model.metadata_props(i).key() == kStrippedKey) model.mutable_metadata_props()->DeleteSubrange(i, 1);
}

/// Whether the tensor's value is always among ImportedModel.values: a large float that something reads.
bool kept_elsewhere(const FileTensor& tensor, const TensorRole& role) {
  if (!tensor.tensor || role.reason == "no path to an output" || !is_float(role.type.dtype)) return false;
  if (numel(static_shape(role.type.shape)) <= kConstantLimit) return false;
  return role.role != Role::constant;  // masks are recognised by their values
}

}  // namespace

namespace {

pb::ModelProto trained(const OnnxModel& source, const std::map<std::string, HostTensor>& values) {
  pb::ModelProto model = source.proto;
  put_values(model, values);
  inference_form(model);
  remove_mark(model);
  return model;
}

/// Moves the tensor's payload to the end of `data`, at an offset that can be mapped.
void move_out(pb::TensorProto& tensor, std::string& data, const std::string& data_file) {
  constexpr std::size_t kPage = 4096;
  data.resize((data.size() + kPage - 1) / kPage * kPage);
  const auto entry = [&](const char* key, const std::string& value) {
    pb::StringStringEntryProto* added = tensor.add_external_data();
    added->set_key(key);
    added->set_value(value);
  };
  entry("location", data_file);
  entry("offset", std::to_string(data.size()));
  entry("length", std::to_string(tensor.raw_data().size()));
  data += tensor.raw_data();
  tensor.clear_raw_data();
  tensor.set_data_location(pb::TensorProto::EXTERNAL);
}

}  // namespace

std::string save_trained(const OnnxModel& source, const std::map<std::string, HostTensor>& values) {
  return serialize(trained(source, values));
}

SavedModel save_trained(const OnnxModel& source, const std::map<std::string, HostTensor>& values,
                        const std::string& data_file, std::uint64_t inline_limit) {
  pb::ModelProto model = trained(source, values);
  SavedModel out;
  if (model.ByteSizeLong() > inline_limit) {
    constexpr std::size_t kWorthMoving = 1024;
    for (pb::TensorProto& tensor : *model.mutable_graph()->mutable_initializer())
      if (tensor.raw_data().size() >= kWorthMoving) move_out(tensor, out.data, data_file);
  }
  out.model = serialize(model);
  return out;
}

std::string source_without_payloads(const OnnxModel& source) {
  pb::ModelProto model = source.proto;
  const Flat flat = flatten(model);
  const std::vector<TensorRole> roles = assign_roles(flat, {});
  bool stripped = source.stripped;
  for (std::size_t i = 0; i < roles.size(); ++i) {
    if (!kept_elsewhere(flat.tensors[i], roles[i])) continue;
    auto& tensor = const_cast<pb::TensorProto&>(*flat.tensors[i].tensor);
    tensor.clear_raw_data();
    tensor.clear_float_data();
    tensor.clear_double_data();
    tensor.clear_int32_data();
    stripped = true;
  }
  remove_mark(model);
  if (stripped) {
    pb::StringStringEntryProto* mark = model.add_metadata_props();
    mark->set_key(kStrippedKey);
    mark->set_value("1");
  }
  return serialize(model);
}

}  // namespace onnxddp

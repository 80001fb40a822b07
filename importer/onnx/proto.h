// Private to importer/onnx: the model as protobuf classes, its tensors, and its nodes without functions.
#pragma once

#include <onnx/onnx_pb.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "importer/importer.h"

namespace onnxddp {

namespace pb = ONNX_NAMESPACE;

class OnnxModel {
 public:
  pb::ModelProto proto;   // external data already inside
  std::string file;       // name for messages
  bool stripped = false;  // payloads of large floats are left out (source_without_payloads)
};

/// Key in metadata_props of a model whose large payloads are left out.
inline constexpr const char* kStrippedKey = "onnx_ddp.stripped";
/// Domain of ops that ONNX does not have.
inline constexpr const char* kOwnDomain = "onnxddp";
/// Float tensors of at most this many elements that do not train are constants in the graph; larger ones are
/// state.
inline constexpr std::int64_t kConstantLimit = 64;

/// "ai.onnx" and "" are one domain.
inline std::string plain_domain(const std::string& domain) {
  return domain == "ai.onnx" ? std::string() : domain;
}
inline bool is_standard(const pb::NodeProto& node, std::string_view op) {
  return node.op_type() == op && plain_domain(node.domain()).empty();
}
const pb::AttributeProto* find_attribute(const pb::NodeProto& node, std::string_view name);
/// `text` on one line, cut to `limit` characters.
std::string one_line(const std::string& text, std::size_t limit = 300);

// ---- tensor.cpp

std::optional<DType> dtype_of_proto(int data_type);
pb::TensorProto::DataType proto_dtype(DType dtype);
/// "float8e5m2"-like name of any ONNX type.
std::string proto_dtype_name(int data_type);
/// Bytes of the tensor's payload by dims and type; throws Error on negative dimensions, overflow and text
/// tensors.
std::uint64_t payload_bytes(const pb::TensorProto& tensor);
/// Throws Error unless the payload has the size that type and dims ask for. `allow_empty`: no payload at all
/// is fine.
void check_payload(const pb::TensorProto& tensor, const std::string& what, bool allow_empty);
bool has_payload(const pb::TensorProto& tensor);
/// Zeros if the tensor has no payload. Throws Error for types that HostTensor does not have.
HostTensor to_host(const pb::TensorProto& tensor, const std::string& what);
HostTensor sparse_to_host(const pb::SparseTensorProto& sparse, const std::string& what);
/// Replaces type, dims and payload; name and doc string stay.
void set_tensor(pb::TensorProto& tensor, const HostTensor& value);
TensorType tensor_type(const pb::TensorProto& tensor);
/// Every TensorProto in the model: initializers, attributes, subgraphs, functions, sparse parts,
/// training_info.
void for_each_tensor(pb::ModelProto& model,
                     const std::function<void(pb::TensorProto&, const std::string& what)>& f);

/// A tensor of the file that may be given a new value: an initializer, or what a Constant node holds.
struct FileTensor {
  std::string name;  // an initializer's, a Constant's output, in functions FUNCTION/OUTPUT
  const pb::TensorProto* tensor = nullptr;  // an initializer, or attribute `value`
  const pb::NodeProto* constant = nullptr;  // the Constant node; null for initializers
  bool sparse() const;
  /// Nothing if HostTensor does not have the type.
  std::optional<TensorType> type() const;
  HostTensor value() const;
  bool has_value() const;
};
/// In the file's order: initializers, Constants of the graph, Constants of functions. The order and names
/// depend on the structure only, so that a reader and a writer agree.
std::vector<FileTensor> file_tensors(const pb::ModelProto& model);

// ---- tensor_file.cpp

/// Throws Error above 2 GiB.
std::string serialize(const pb::ModelProto& model);

// ---- load.cpp

std::shared_ptr<const OnnxModel> load_onnx_bytes(const std::string& bytes, const std::string& name,
                                                 const std::filesystem::path& folder);

// ---- external_data.cpp

/// Reads the payload of every tensor with external data into the model. `folder`: where the model lies;
/// empty: it does not lie in a file.
void load_external_data(pb::ModelProto& model, const std::filesystem::path& folder);

// ---- structure.cpp

/// Throws Error for undefined inputs, duplicate definitions, cycles and recursive or too deeply nested
/// functions.
void check_structure(const pb::ModelProto& model);

// ---- flatten.cpp

using Opsets = std::map<std::string, int>;  // by plain domain
Opsets opsets_of(const google::protobuf::RepeatedPtrField<pb::OperatorSetIdProto>& imports);

/// A node of the model with functions of the model inlined.
struct FlatNode {
  std::shared_ptr<const pb::NodeProto>
      proto;  // attributes resolved; its own input and output names do not count
  std::vector<std::string> inputs, outputs;  // "" where absent
  std::vector<bool> used;                    // by output
  std::shared_ptr<const Opsets> opsets;
  std::string origin;

  const std::string& op() const { return proto->op_type(); }
  std::string domain() const { return plain_domain(proto->domain()); }
  int opset() const;
  bool is(std::string_view op_type) const { return is_standard(*proto, op_type); }
  /// "Conv 'conv1'"
  std::string label() const;
};

struct Flat {
  std::vector<FileTensor> tensors;
  std::vector<FlatNode> nodes;                                // topological, without dead ones
  std::unordered_map<std::string, std::size_t> tensor_index;  // name -> index in tensors
  std::set<std::string> names;                                // taken
};
/// Inlines model-local functions and drops what no output needs.
Flat flatten(const pb::ModelProto& model);
/// The body of `function` in place of `call`.
std::vector<FlatNode> inline_function(const pb::FunctionProto& function, const FlatNode& call,
                                      std::set<std::string>& names);
/// ONNX's own body of the op, or nothing. `types`: of the inputs (empty ones where absent); needed for bodies
/// that depend on them.
std::shared_ptr<const pb::FunctionProto> onnx_body(const FlatNode& node,
                                                   const std::vector<pb::TypeProto>& types);
std::vector<std::string> unknown_ops(const Flat& flat);
/// Whether ONNX itself, the model or our registry knows every op.
bool all_ops_known_to_onnx(const Flat& flat);

// ---- convert.cpp

/// `domain`: of the node; lists of texts are dimension lists in our own.
Attr to_attr(const pb::AttributeProto& attribute, const std::string& domain);
/// A dimension's name as a symbol: an expression as it is, anything else with other characters replaced.
Dim symbol_of(const std::string& name);
/// The value of --input NAME=TEXT.
double number_of(const std::string& name, const std::string& text);
pb::TypeProto type_proto(const TensorType& type);

// ---- roles.cpp

/// One role for each of flat.tensors (same order); types that HostTensor does not have are Role::constant.
std::vector<TensorRole> assign_roles(const Flat& flat, const ImportOptions& options);

}  // namespace onnxddp

// TensorProto <-> HostTensor, and where a model keeps its tensors.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "importer/onnx/proto.h"

namespace onnxddp {

static_assert(std::endian::native == std::endian::little, "payloads of ONNX files are little-endian");

namespace {

using T = pb::TensorProto;

struct ProtoType {
  int proto;
  std::optional<DType> dtype;
  int bits;
  const char* name;
};

const ProtoType kTypes[] = {
    {T::FLOAT, DType::f32, 32, "float"},
    {T::DOUBLE, DType::f64, 64, "double"},
    {T::FLOAT16, DType::f16, 16, "float16"},
    {T::BFLOAT16, DType::bf16, 16, "bfloat16"},
    {T::INT8, DType::i8, 8, "int8"},
    {T::INT16, DType::i16, 16, "int16"},
    {T::INT32, DType::i32, 32, "int32"},
    {T::INT64, DType::i64, 64, "int64"},
    {T::UINT8, DType::u8, 8, "uint8"},
    {T::UINT16, DType::u16, 16, "uint16"},
    {T::UINT32, DType::u32, 32, "uint32"},
    {T::UINT64, DType::u64, 64, "uint64"},
    {T::BOOL, DType::boolean, 8, "bool"},
    {T::COMPLEX64, {}, 64, "complex64"},
    {T::COMPLEX128, {}, 128, "complex128"},
    {T::FLOAT8E4M3FN, {}, 8, "float8e4m3fn"},
    {T::FLOAT8E4M3FNUZ, {}, 8, "float8e4m3fnuz"},
    {T::FLOAT8E5M2, {}, 8, "float8e5m2"},
    {T::FLOAT8E5M2FNUZ, {}, 8, "float8e5m2fnuz"},
    {T::UINT4, {}, 4, "uint4"},
    {T::INT4, {}, 4, "int4"},
    {T::STRING, {}, 0, "string"},
};

const ProtoType* find_type(int data_type) {
  for (const ProtoType& type : kTypes)
    if (type.proto == data_type) return &type;
  return nullptr;
}

std::string dims_text(const T& tensor) { return shape_str(Ints(tensor.dims().begin(), tensor.dims().end())); }

std::uint64_t element_count(const T& tensor) {
  std::uint64_t count = 1;
  bool empty = false;
  for (std::int64_t d : tensor.dims()) {
    if (d < 0) throw Error(cat("negative dimension in ", dims_text(tensor)));
    empty |= d == 0;
    if (d != 0 &&
        count > std::uint64_t{std::numeric_limits<std::int64_t>::max()} / 16 / static_cast<std::uint64_t>(d))
      throw Error(cat("dimensions ", dims_text(tensor), " are too large"));
    if (d != 0) count *= static_cast<std::uint64_t>(d);
  }
  return empty ? 0 : count;
}

/// Elements in the typed fields, for those types of which HostTensor knows the field.
std::uint64_t typed_count(const T& tensor) {
  switch (tensor.data_type()) {
    case T::FLOAT: return static_cast<std::uint64_t>(tensor.float_data_size());
    case T::DOUBLE: return static_cast<std::uint64_t>(tensor.double_data_size());
    case T::INT64: return static_cast<std::uint64_t>(tensor.int64_data_size());
    case T::UINT32:
    case T::UINT64: return static_cast<std::uint64_t>(tensor.uint64_data_size());
    default: return static_cast<std::uint64_t>(tensor.int32_data_size());
  }
}

template <class To, class Field>
void copy_field(HostTensor& out, const Field& field) {
  auto* to = reinterpret_cast<To*>(out.mutable_raw());
  for (int i = 0; i < field.size(); ++i) to[i] = static_cast<To>(field.Get(i));
}

void copy_typed(HostTensor& out, const T& tensor) {
  switch (tensor.data_type()) {
    case T::FLOAT: return copy_field<float>(out, tensor.float_data());
    case T::DOUBLE: return copy_field<double>(out, tensor.double_data());
    case T::INT64: return copy_field<std::int64_t>(out, tensor.int64_data());
    case T::UINT64: return copy_field<std::uint64_t>(out, tensor.uint64_data());
    case T::UINT32: return copy_field<std::uint32_t>(out, tensor.uint64_data());
    case T::INT32: return copy_field<std::int32_t>(out, tensor.int32_data());
    case T::INT16: return copy_field<std::int16_t>(out, tensor.int32_data());
    case T::UINT16:
    case T::FLOAT16:
    case T::BFLOAT16: return copy_field<std::uint16_t>(out, tensor.int32_data());
    case T::INT8: return copy_field<std::int8_t>(out, tensor.int32_data());
    case T::UINT8: return copy_field<std::uint8_t>(out, tensor.int32_data());
    default: break;
  }
  auto* to = reinterpret_cast<std::uint8_t*>(out.mutable_raw());
  for (int i = 0; i < tensor.int32_data_size(); ++i) to[i] = tensor.int32_data(i) != 0;
}

using Visit = std::function<void(T&, const std::string&)>;

void visit_graph(pb::GraphProto& graph, const std::string& prefix, const Visit& f);

void visit_node(pb::NodeProto& node, const std::string& prefix, const Visit& f) {
  const std::string what = cat(prefix, "attribute of ", node.op_type(), " '", node.name(), "'");
  for (pb::AttributeProto& attribute : *node.mutable_attribute()) {
    if (attribute.has_t()) f(*attribute.mutable_t(), what);
    for (T& tensor : *attribute.mutable_tensors()) f(tensor, what);
    if (attribute.has_sparse_tensor()) {
      f(*attribute.mutable_sparse_tensor()->mutable_values(), what);
      f(*attribute.mutable_sparse_tensor()->mutable_indices(), what);
    }
    for (pb::SparseTensorProto& sparse : *attribute.mutable_sparse_tensors()) {
      f(*sparse.mutable_values(), what);
      f(*sparse.mutable_indices(), what);
    }
    if (attribute.has_g()) visit_graph(*attribute.mutable_g(), prefix, f);
    for (pb::GraphProto& graph : *attribute.mutable_graphs()) visit_graph(graph, prefix, f);
  }
}

void visit_graph(pb::GraphProto& graph, const std::string& prefix, const Visit& f) {
  for (T& tensor : *graph.mutable_initializer()) f(tensor, cat(prefix, "initializer '", tensor.name(), "'"));
  for (pb::SparseTensorProto& sparse : *graph.mutable_sparse_initializer()) {
    const std::string what = cat(prefix, "sparse initializer '", sparse.values().name(), "'");
    f(*sparse.mutable_values(), what);
    f(*sparse.mutable_indices(), what);
  }
  for (pb::NodeProto& node : *graph.mutable_node()) visit_node(node, prefix, f);
}

}  // namespace

const pb::AttributeProto* find_attribute(const pb::NodeProto& node, std::string_view name) {
  for (const pb::AttributeProto& attribute : node.attribute())
    if (attribute.name() == name) return &attribute;
  return nullptr;
}

std::string one_line(const std::string& text, std::size_t limit) {
  std::string out;
  for (char c : text) {
    const bool space = static_cast<unsigned char>(c) <= ' ';
    if (space && (out.empty() || out.back() == ' ')) continue;
    out += space ? ' ' : c;
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  if (out.size() > limit) out = out.substr(0, limit) + "…";
  return out;
}

std::optional<DType> dtype_of_proto(int data_type) {
  const ProtoType* type = find_type(data_type);
  return type ? type->dtype : std::nullopt;
}

pb::TensorProto::DataType proto_dtype(DType dtype) {
  for (const ProtoType& type : kTypes)
    if (type.dtype == dtype) return static_cast<T::DataType>(type.proto);
  throw InternalError("dtype without an ONNX type");
}

std::string proto_dtype_name(int data_type) {
  const ProtoType* type = find_type(data_type);
  return type ? type->name : cat("type ", data_type);
}

std::uint64_t payload_bytes(const pb::TensorProto& tensor) {
  const ProtoType* type = find_type(tensor.data_type());
  if (!type || type->bits == 0)
    throw Error(cat("element type ", proto_dtype_name(tensor.data_type()), " has no fixed size"));
  const std::uint64_t count = element_count(tensor);
  return type->bits >= 8 ? count * static_cast<std::uint64_t>(type->bits / 8) : (count + 1) / 2;
}

bool has_payload(const pb::TensorProto& tensor) {
  return tensor.has_raw_data() || tensor.float_data_size() || tensor.double_data_size() ||
         tensor.int32_data_size() || tensor.int64_data_size() || tensor.uint64_data_size() ||
         tensor.string_data_size();
}

void check_payload(const pb::TensorProto& tensor, const std::string& what, bool allow_empty) {
  try {
    const std::uint64_t count = element_count(tensor);
    if (tensor.data_type() == T::STRING || !find_type(tensor.data_type())) return;  // the checker knows these
    if (allow_empty && !has_payload(tensor)) return;
    if (tensor.has_raw_data()) {
      if (tensor.raw_data().size() != payload_bytes(tensor))
        throw Error(cat("holds ", tensor.raw_data().size(), " bytes, but ",
                        proto_dtype_name(tensor.data_type()), dims_text(tensor), " needs ",
                        payload_bytes(tensor)));
    } else if (dtype_of_proto(tensor.data_type()) && typed_count(tensor) != count) {
      throw Error(cat("holds ", typed_count(tensor), " elements, but ", dims_text(tensor), " needs ", count));
    }
  } catch (const Error& e) {
    throw Error(cat(what, ": ", e.what()))
        .hint("the file is damaged or was written wrongly; export it again");
  }
}

TensorType tensor_type(const pb::TensorProto& tensor) {
  const auto dtype = dtype_of_proto(tensor.data_type());
  if (!dtype)
    throw Error(cat("tensor '", tensor.name(), "' has element type ", proto_dtype_name(tensor.data_type()),
                    ", which is not supported"));
  return {*dtype, to_shape(Ints(tensor.dims().begin(), tensor.dims().end()))};
}

HostTensor to_host(const pb::TensorProto& tensor, const std::string& what) {
  const auto dtype = dtype_of_proto(tensor.data_type());
  if (!dtype)
    throw Error(
        cat(what, " has element type ", proto_dtype_name(tensor.data_type()), ", which is not supported"));
  check_payload(tensor, what, true);
  HostTensor out(*dtype, Ints(tensor.dims().begin(), tensor.dims().end()));
  if (tensor.has_raw_data()) {
    if (out.bytes()) std::memcpy(out.mutable_raw(), tensor.raw_data().data(), out.bytes());
  } else if (has_payload(tensor) && out.bytes()) {
    copy_typed(out, tensor);
  }
  return out;
}

HostTensor sparse_to_host(const pb::SparseTensorProto& sparse, const std::string& what) {
  const HostTensor values = to_host(sparse.values(), what), indices = to_host(sparse.indices(), what);
  const Ints dims(sparse.dims().begin(), sparse.dims().end());
  constexpr std::int64_t kLargest = std::int64_t{1}
                                    << 26;  // the dense form has no bytes in the file that bound it
  std::int64_t count = 1;
  for (std::int64_t d : dims) {
    if (d < 0 || (d > 0 && count > kLargest / d))
      throw Error(cat(what, ": sparse tensor of shape ", shape_str(dims), " is too large"));
    count *= d;
  }
  const auto rank = static_cast<std::int64_t>(dims.size());
  const std::int64_t nonzero = values.numel();
  const bool linear = indices.shape().size() == 1;
  if (indices.dtype() != DType::i64 || indices.numel() != nonzero * (linear ? 1 : rank))
    throw Error(cat(what, ": indices ", shape_str(indices.shape()), " do not fit ", nonzero, " values"));
  HostTensor out(values.dtype(), dims);
  const std::size_t size = dtype_size(values.dtype());
  std::byte* to = out.mutable_raw();
  for (std::int64_t i = 0; i < nonzero; ++i) {
    std::int64_t at = linear ? indices.as_int(i) : 0;
    for (std::int64_t k = 0; !linear && k < rank; ++k) {
      const std::int64_t index = indices.as_int(i * rank + k), extent = dims[static_cast<std::size_t>(k)];
      if (index < 0 || index >= extent) at = count;
      at = at >= count ? count : at * extent + index;
    }
    if (at < 0 || at >= count) throw Error(cat(what, ": index out of range in a sparse tensor"));
    std::memcpy(to + static_cast<std::size_t>(at) * size, values.raw() + static_cast<std::size_t>(i) * size,
                size);
  }
  return out;
}

void set_tensor(pb::TensorProto& tensor, const HostTensor& value) {
  const std::string name = tensor.name(), doc = tensor.doc_string();
  const auto metadata = tensor.metadata_props();
  tensor.Clear();
  if (!name.empty()) tensor.set_name(name);
  if (!doc.empty()) tensor.set_doc_string(doc);
  *tensor.mutable_metadata_props() = metadata;
  tensor.set_data_type(proto_dtype(value.dtype()));
  for (std::int64_t d : value.shape()) tensor.add_dims(d);
  tensor.set_raw_data(value.raw(), value.bytes());
}

void for_each_tensor(pb::ModelProto& model, const Visit& f) {
  visit_graph(*model.mutable_graph(), "", f);
  for (pb::FunctionProto& function : *model.mutable_functions())
    for (pb::NodeProto& node : *function.mutable_node())
      visit_node(node, cat("function '", function.name(), "', "), f);
  for (pb::TrainingInfoProto& info : *model.mutable_training_info()) {
    if (info.has_initialization()) visit_graph(*info.mutable_initialization(), "training_info, ", f);
    if (info.has_algorithm()) visit_graph(*info.mutable_algorithm(), "training_info, ", f);
  }
}

bool FileTensor::sparse() const { return constant && find_attribute(*constant, "sparse_value"); }

std::optional<TensorType> FileTensor::type() const {
  if (tensor) {
    if (!dtype_of_proto(tensor->data_type())) return std::nullopt;
    return tensor_type(*tensor);
  }
  if (find_attribute(*constant, "value_string") || find_attribute(*constant, "value_strings"))
    return std::nullopt;
  return value().type();
}

HostTensor FileTensor::value() const {
  const std::string what = cat(constant ? "Constant '" : "initializer '", name, "'");
  if (tensor) return to_host(*tensor, what);
  for (const pb::AttributeProto& a : constant->attribute()) {
    if (a.name() == "value_float") return HostTensor::scalar(a.f());
    if (a.name() == "value_int") return HostTensor::scalar<std::int64_t>(a.i());
    if (a.name() == "value_floats")
      return HostTensor::of<float>({a.floats_size()}, {a.floats().begin(), a.floats().end()});
    if (a.name() == "value_ints")
      return HostTensor::of<std::int64_t>({a.ints_size()}, {a.ints().begin(), a.ints().end()});
    if (a.name() == "sparse_value") return sparse_to_host(a.sparse_tensor(), what);
  }
  throw Error(cat(what, " holds text or nothing, which is not supported"));
}

bool FileTensor::has_value() const {
  if (!tensor) return true;
  return has_payload(*tensor) || element_count(*tensor) == 0;
}

namespace {

void add_constants(std::vector<FileTensor>& out, std::set<std::string>& names, const pb::NodeProto& node,
                   const std::string& prefix) {
  if (!is_standard(node, "Constant") || node.output_size() == 0) return;
  for (const pb::AttributeProto& attribute : node.attribute())
    if (!attribute.ref_attr_name().empty()) return;  // another value at every call
  FileTensor found;
  found.name = prefix + node.output(0);
  for (int k = 2; !prefix.empty() && names.count(found.name); ++k)
    found.name = cat(prefix, node.output(0), ".", k);
  names.insert(found.name);
  found.constant = &node;
  const pb::AttributeProto* value = find_attribute(node, "value");
  if (value && value->has_t()) found.tensor = &value->t();
  out.push_back(std::move(found));
}

}  // namespace

std::vector<FileTensor> file_tensors(const pb::ModelProto& model) {
  std::vector<FileTensor> out;
  std::set<std::string> names;
  const pb::GraphProto& graph = model.graph();
  for (const pb::ValueInfoProto& input : graph.input()) names.insert(input.name());
  for (const pb::NodeProto& node : graph.node()) names.insert(node.output().begin(), node.output().end());
  for (const T& tensor : graph.initializer()) {
    names.insert(tensor.name());
    out.push_back({tensor.name(), &tensor, nullptr});
  }
  for (const pb::NodeProto& node : graph.node()) add_constants(out, names, node, "");
  for (const pb::FunctionProto& function : model.functions())
    for (const pb::NodeProto& node : function.node()) add_constants(out, names, node, function.name() + "/");
  return out;
}

}  // namespace onnxddp

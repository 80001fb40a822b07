// Attributes, types, dimension names and --input values of ONNX as ours.
#include <cctype>
#include <cstdlib>

#include "importer/onnx/proto.h"

namespace onnxddp {

Attr to_attr(const pb::AttributeProto& attribute, const std::string& domain) {
  using A = pb::AttributeProto;
  switch (attribute.type()) {
    case A::INT: return attribute.i();
    case A::FLOAT: return decimal_of(attribute.f());
    case A::STRING: return attribute.s();
    case A::INTS: return Ints(attribute.ints().begin(), attribute.ints().end());
    case A::FLOATS: {
      std::vector<double> out;
      for (float f : attribute.floats()) out.push_back(decimal_of(f));
      return out;
    }
    case A::STRINGS:
      if (domain == kOwnDomain) {  // dimension lists of graph_to_onnx
        Dims dims;
        for (const std::string& text : attribute.strings()) dims.push_back(Dim::parse(text));
        return make_attr(dims);
      }
      break;
    default: break;
  }
  throw Error(cat("attribute '", attribute.name(), "' has a type that is not supported"));
}

Dim symbol_of(const std::string& name) {
  try {
    const Dim dim = Dim::parse(name);
    if (!dim.is_constant() && (dim.symbols().size() == 1 || name.find('-') == std::string::npos)) return dim;
  } catch (const Error&) {  // "batch-size", "unk__0 (dynamic)" and the like are names
  }
  std::string out;
  for (char c : name) out += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  if (out.empty() || std::isdigit(static_cast<unsigned char>(out[0]))) out = "d_" + out;
  return Dim::symbol(out);
}

double number_of(const std::string& name, const std::string& text) {
  if (text == "true") return 1;
  if (text == "false") return 0;
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0')
    throw usage_error(cat("--input ", name, "=", text, ": not a number, true or false"));
  return value;
}

pb::TypeProto type_proto(const TensorType& type) {
  pb::TypeProto out;
  out.mutable_tensor_type()->set_elem_type(proto_dtype(type.dtype));
  auto* shape = out.mutable_tensor_type()->mutable_shape();
  for (const Dim& dim : type.shape) {
    auto* d = shape->add_dim();
    if (dim.is_constant())
      d->set_dim_value(dim.value());
    else
      d->set_dim_param(dim.str());
  }
  return out;
}

}  // namespace onnxddp

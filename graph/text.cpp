#include "graph/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "graph/attributes.h"

namespace onnxddp {
namespace {

constexpr std::int64_t kInlineElements = 16;
constexpr std::string_view kDigestPrefix = "@fnv1a:";

bool plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '/' || c == ':' ||
         c == '-';
}

std::string quoted(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kHex[(c >> 4) & 15];
      out += kHex[c & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string name_str(const std::string& name) {
  const bool bare = !name.empty() && name != "_" && std::all_of(name.begin(), name.end(), plain);
  return bare ? name : quoted(name);
}

template <class T, class F>
std::string list_str(const std::vector<T>& items, F&& text) {
  std::string out = "[";
  for (std::size_t i = 0; i < items.size(); ++i) out += (i > 0 ? ", " : "") + text(items[i]);
  return out + "]";
}

std::string element_str(const HostTensor& data, std::int64_t i) {
  switch (data.dtype()) {
    case DType::f32: return number_str(decimal_of(data.data<float>()[i]));
    case DType::f64:
    case DType::f16:
    case DType::bf16: return number_str(data.as_double(i));
    default: return std::to_string(data.as_int(i));
  }
}

std::string constant_str(const Value& value, Blobs* blobs) {
  if (!value.data) return list_str(*value.ints, [](const Dim& d) { return d.str(); });
  if (value.data->numel() > kInlineElements) {
    const std::string digest = value.data->digest();
    if (blobs != nullptr) blobs->emplace(digest, *value.data);
    return cat(kDigestPrefix, digest);
  }
  std::string out = "[";
  for (std::int64_t i = 0; i < value.data->numel(); ++i)
    out += (i > 0 ? ", " : "") + element_str(*value.data, i);
  return out + "]";
}

}  // namespace

std::string attr_str(const Attr& attr) {
  struct Printer {
    std::string operator()(std::int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return number_str(v); }
    std::string operator()(const std::string& v) const { return quoted(v); }
    std::string operator()(const Ints& v) const { return shape_str(v); }
    std::string operator()(const Dims& v) const { return shape_str(v); }
    std::string operator()(const std::vector<double>& v) const {
      std::string out = "[";
      for (std::size_t i = 0; i < v.size(); ++i) out += (i > 0 ? "," : "") + number_str(v[i]);
      return out + "]";
    }
  };
  return std::visit(Printer{}, attr);
}

std::string dump_node(const Graph& graph, NodeId id) {
  const Node& node = graph.node(id);
  std::string out;
  for (std::size_t i = 0; i < node.outputs.size(); ++i) {
    const Value& value = graph.value(node.outputs[i]);
    out += cat(i > 0 ? ", " : "", name_str(value.name), ": ", value.type);
  }
  out += cat(" = ", node.op->name, "(");
  for (std::size_t i = 0; i < node.inputs.size(); ++i)
    out += cat(i > 0 ? ", " : "", node.inputs[i] ? name_str(graph.value(node.inputs[i]).name) : "_");
  out += ")";
  if (!node.attrs.empty()) {
    out += " {";
    for (const auto& [name, attr] : node.attrs)
      out += cat(out.back() == '{' ? "" : ", ", name, "=", attr_str(attr));
    out += "}";
  }
  return out;
}

std::string dump(const Graph& graph, Blobs* blobs) {
  std::string out = cat("graph ", name_str(graph.name), " v1\n");
  for (ValueId id : graph.inputs)
    out += cat("input  ", name_str(graph.value(id).name), ": ", graph.value(id).type, "\n");
  for (ValueId id : graph.params) {
    const Value& value = graph.value(id);
    out += cat(kind_name(value.kind), "  ", name_str(value.name), ": ", value.type, "\n");
  }
  for (ValueId id : graph.constants) {
    const Value& value = graph.value(id);
    out += cat("const  ", name_str(value.name), ": ", value.type, " = ", constant_str(value, blobs), "\n");
  }
  for (NodeId id : graph.order) out += cat("  ", dump_node(graph, id), "\n");
  for (const Update& update : graph.updates)
    out += cat("update ", name_str(graph.value(update.param).name), " <- ",
               name_str(graph.value(update.next).name), "\n");
  for (const Output& output : graph.outputs) {
    const std::string& name = graph.value(output.value).name;
    out += cat("output ", name_str(output.name), name == output.name ? "" : cat(" = ", name_str(name)), "\n");
  }
  return out;
}

namespace {

/// Reads one line.
class Line {
 public:
  Line(std::string_view text, int number) : text_(text), number_(number) { skip(); }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(cat("graph text, line ", number_, ": ", what)).in(std::string(text_));
  }
  bool done() const { return at_ >= text_.size() || text_[at_] == '#'; }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    skip();
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(cat("expected '", c, "' at column ", at_ + 1));
  }
  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    const char next = at_ + word.size() < text_.size() ? text_[at_ + word.size()] : ' ';
    if (plain(next)) return false;
    at_ += word.size();
    skip();
    return true;
  }
  std::string name() {
    if (peek() == '"') return string();
    std::string out;
    while (plain(peek())) out += text_[at_++];
    // A bare name is followed by ':' before a type; the last colon then is not part of it.
    if (!out.empty() && out.back() == ':') {
      out.pop_back();
      --at_;
    }
    if (out.empty()) fail(cat("expected a name at column ", at_ + 1));
    skip();
    return out;
  }
  std::string string() {
    std::string out;
    ++at_;
    while (peek() != '"') {
      if (at_ >= text_.size()) fail("unterminated string");
      if (peek() != '\\') {
        out += text_[at_++];
        continue;
      }
      ++at_;
      if (peek() == 'u') {
        out += static_cast<char>(std::stoi(std::string(text_.substr(at_ + 3, 2)), nullptr, 16));
        at_ += 5;
      } else {
        out += text_[at_++];
      }
    }
    ++at_;
    skip();
    return out;
  }
  /// Text up to one of `stops` outside brackets.
  std::string until(std::string_view stops) {
    std::string out;
    int depth = 0;
    while (at_ < text_.size() && (depth > 0 || stops.find(text_[at_]) == std::string_view::npos)) {
      if (text_[at_] == '[' || text_[at_] == '(') ++depth;
      if (text_[at_] == ']' || text_[at_] == ')') --depth;
      out += text_[at_++];
    }
    while (!out.empty() && out.back() == ' ') out.pop_back();
    skip();
    return out;
  }
  TensorType type() {
    const std::string text = until(",=#) ");
    return TensorType::parse(text);
  }
  std::vector<std::string> list() {
    expect('[');
    std::vector<std::string> out;
    while (!take(']')) {
      out.push_back(peek() == '"' ? string() : until(",]"));
      if (peek() != ']') expect(',');
    }
    return out;
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
  }
  std::string_view text_;
  std::size_t at_ = 0;
  int number_;
};

double parse_double(const std::string& text, const Line& line) {
  if (text == "nan") return NAN;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    line.fail(cat("'", text, "' is not a number"));
  return value;
}

std::int64_t parse_int(const std::string& text, const Line& line) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    line.fail(cat("'", text, "' is not an integer"));
  return value;
}

bool is_number(const std::string& text) {
  if (text == "nan" || text == "inf" || text == "-inf") return true;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

HostTensor tensor_of(const TensorType& type, const std::vector<std::string>& items, const Line& line) {
  HostTensor data(type.dtype, static_shape(type.shape));
  if (data.numel() != static_cast<std::int64_t>(items.size())) line.fail("the contents do not fill the type");
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    if (type.dtype == DType::i64) {
      data.mutable_data<std::int64_t>()[i] = parse_int(items[i], line);
    } else {
      data.set_double(at, parse_double(items[i], line));
    }
  }
  return data;
}

Attr parse_attr(Line& line, const Attr& like) {
  if (line.peek() == '[') {
    const std::vector<std::string> items = line.list();
    if (std::holds_alternative<std::vector<double>>(like)) {
      std::vector<double> out;
      for (const std::string& item : items) out.push_back(parse_double(item, line));
      return out;
    }
    Dims out;
    for (const std::string& item : items) out.push_back(Dim::parse(item));
    return make_attr(out);
  }
  if (line.peek() == '"') return line.string();
  const std::string text = line.until(",}");
  if (std::holds_alternative<double>(like)) return parse_double(text, line);
  return parse_int(text, line);
}

Attrs parse_attrs(Line& line, const OpDef& op) {
  Attrs attrs;
  if (!line.take('{')) return attrs;
  while (!line.take('}')) {
    const std::string name = line.name();
    line.expect('=');
    const auto spec =
        std::find_if(op.attrs.begin(), op.attrs.end(), [&](const AttrSpec& s) { return s.name == name; });
    if (spec == op.attrs.end()) line.fail(cat(op.name, " has no attribute '", name, "'"));
    attrs.emplace(name, parse_attr(line, spec->default_value));
    if (line.peek() != '}') line.expect(',');
  }
  return attrs;
}

class Parser {
 public:
  Parser(const Blobs& blobs, const Registry& registry) : blobs_(blobs), registry_(registry) {}

  Graph run(std::string_view text) {
    int number = 0;
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      Line line(text.substr(0, end), ++number);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line.done()) continue;
      try {
        statement(line);
      } catch (Error& error) {
        error.add_in(cat("graph text, line ", number));
        throw;
      }
      if (!line.done()) line.fail("unexpected text at the end");
    }
    if (!started_) throw Error("graph text: no 'graph NAME v1' line");
    return std::move(graph_);
  }

 private:
  void statement(Line& line) {
    if (!started_) {
      if (!line.take_word("graph")) line.fail("expected 'graph NAME v1'");
      graph_.name = line.name();
      if (!line.take_word("v1")) line.fail("unknown format version; this program reads v1");
      started_ = true;
    } else if (line.take_word("input")) {
      const std::string name = fresh(line);
      graph_.add_input(name, line.type());
    } else if (line.take_word("param")) {
      const std::string name = fresh(line);
      graph_.add_param(name, line.type(), Kind::param);
    } else if (line.take_word("state")) {
      const std::string name = fresh(line);
      graph_.add_param(name, line.type(), Kind::state);
    } else if (line.take_word("const")) {
      constant(line);
    } else if (line.take_word("update")) {
      const ValueId param = known(line);
      line.expect('<');
      line.expect('-');
      graph_.updates.push_back({param, known(line)});
    } else if (line.take_word("output")) {
      const std::string name = line.name();
      if (line.take('=')) {
        graph_.outputs.push_back({name, known(line)});
      } else {
        graph_.outputs.push_back({name, lookup(line, name)});
      }
    } else {
      node(line);
    }
  }
  std::string fresh(Line& line) {
    std::string name = line.name();
    if (graph_.find(name)) line.fail(cat("'", name, "' is defined twice"));
    line.expect(':');
    return name;
  }
  ValueId lookup(const Line& line, const std::string& name) const {
    const ValueId id = graph_.find(name);
    if (!id) line.fail(cat("'", name, "' is not defined"));
    return id;
  }
  ValueId known(Line& line) { return lookup(line, line.name()); }
  void constant(Line& line) {
    const std::string name = fresh(line);
    const TensorType type = line.type();
    line.expect('=');
    if (line.peek() == '@') {
      const std::string digest = line.until(" #").substr(kDigestPrefix.size());
      const auto blob = blobs_.find(digest);
      if (blob == blobs_.end()) line.fail(cat("the blob table has no ", digest));
      graph_.add_constant(name, blob->second);
      return;
    }
    const std::vector<std::string> items = line.list();
    if (std::all_of(items.begin(), items.end(), is_number)) {
      graph_.add_constant(name, tensor_of(type, items, line));
      return;
    }
    Dims dims;
    for (const std::string& item : items) dims.push_back(Dim::parse(item));
    graph_.add_constant(name, type, dims);
  }
  void node(Line& line) {
    std::vector<std::string> names;
    std::vector<TensorType> types;
    do {
      names.push_back(fresh(line));
      types.push_back(line.type());
    } while (line.take(','));
    line.expect('=');
    const OpDef& op = registry_.get(line.name());
    line.expect('(');
    std::vector<ValueId> inputs;
    while (!line.take(')')) {
      inputs.push_back(line.take_word("_") ? kNone : known(line));
      if (line.peek() != ')') line.expect(',');
    }
    Builder builder(graph_, graph_.order, registry_);
    const std::vector<ValueId> outputs =
        builder.emit(op.name, inputs, parse_attrs(line, op), names, names.size());
    if (outputs.size() != names.size()) line.fail(cat(op.name, " has ", outputs.size(), " outputs"));
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Value& value = graph_.value(outputs[i]);
      if (value.type != types[i]) line.fail(cat("'", value.name, "' is ", value.type, ", not ", types[i]));
    }
  }

  const Blobs& blobs_;
  const Registry& registry_;
  Graph graph_;
  bool started_ = false;
};

}  // namespace

Graph parse(std::string_view text, const Blobs& blobs, const Registry& registry) {
  return Parser(blobs, registry).run(text);
}

Sample parse_sample(std::string_view text, DType dtype, const Registry& registry) {
  std::string replaced(text);
  for (std::size_t at = 0; (at = replaced.find("f32", at)) != std::string::npos; at += 3)
    replaced.replace(at, 3, dtype_name(dtype));
  Line line(replaced, 1);
  Sample sample;
  const OpDef& op = registry.get(line.until("("));
  sample.graph.name = op.name;
  line.expect('(');
  std::vector<ValueId> inputs;
  while (!line.take(')')) {
    const std::string name = cat("x", inputs.size());
    if (line.take_word("_")) {
      inputs.push_back(kNone);
    } else {
      const TensorType type = line.type();
      if (line.take('=')) {
        inputs.push_back(sample.graph.add_constant(name, tensor_of(type, line.list(), line)));
      } else {
        inputs.push_back(sample.graph.add_input(name, type));
        if (line.take_word("in")) {
          line.expect('(');
          const double low = parse_double(line.until(","), line);
          line.expect(',');
          sample.ranges[name] = {low, parse_double(line.until(")"), line)};
          line.expect(')');
        }
      }
    }
    if (line.peek() != ')') line.expect(',');
  }
  Builder builder(sample.graph, sample.graph.order, registry);
  const Attrs attrs = parse_attrs(line, op);
  constexpr std::size_t kAllOutputs = 1000;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < kAllOutputs && i < 8; ++i) names.push_back(cat("y", i));
  for (ValueId id : builder.emit(op.name, inputs, attrs, names, kAllOutputs))
    sample.graph.outputs.push_back({sample.graph.value(id).name, id});
  return sample;
}

}  // namespace onnxddp

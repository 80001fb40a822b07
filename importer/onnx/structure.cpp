// What must hold before ONNX's checker sees a model: it stops at the first thing it dislikes and recurses
// into functions.
#include <algorithm>

#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

using Nodes = google::protobuf::RepeatedPtrField<pb::NodeProto>;

constexpr int kMaxDepth = 64;                   // of function calls
constexpr std::uint64_t kMaxNodes = 1'000'000;  // after inlining

std::string label(const Nodes& nodes, int i) {
  const pb::NodeProto& node = nodes.Get(i);
  return cat("node ", i, node.name().empty() ? "" : " '" + node.name() + "'", ", ", node.op_type());
}

/// One cycle among the nodes that a topological sort leaves over, as "a -> b -> a".
[[noreturn]] void report_cycle(const Nodes& nodes, const std::vector<std::vector<int>>& readers,
                               const std::vector<int>& missing, const std::string& where) {
  std::vector<std::vector<int>> producers(missing.size());
  for (std::size_t i = 0; i < readers.size(); ++i)
    for (int reader : readers[i])
      if (missing[i] > 0) producers[static_cast<std::size_t>(reader)].push_back(static_cast<int>(i));
  int at = static_cast<int>(std::find_if(missing.begin(), missing.end(), [](int m) { return m > 0; }) -
                            missing.begin());
  std::vector<int> path;
  std::set<int> seen;
  while (seen.insert(at).second) {  // every left-over node has a left-over producer
    path.push_back(at);
    at = producers[static_cast<std::size_t>(at)].front();
  }
  path.erase(path.begin(), std::find(path.begin(), path.end(), at));
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(path.size(), 5); ++i)
    text += cat(label(nodes, path[path.size() - 1 - i]), " -> ");
  if (path.size() > 5) text += "… -> ";
  throw Error(cat(where, "the nodes form a cycle: ", text, label(nodes, path.back())))
      .hint("an ONNX graph must be acyclic");
}

void check_nodes(const Nodes& nodes, std::set<std::string> defined, const std::string& where) {
  std::unordered_map<std::string, int> producer;
  for (int i = 0; i < nodes.size(); ++i)
    for (const std::string& output : nodes.Get(i).output()) {
      if (output.empty()) continue;
      if (defined.count(output) || !producer.emplace(output, i).second)
        throw Error(
            cat(where, "tensor '", output, "' is defined twice, the second time by ", label(nodes, i)));
    }
  std::vector<std::vector<int>> readers(static_cast<std::size_t>(nodes.size()));
  std::vector<int> missing(static_cast<std::size_t>(nodes.size()), 0);
  for (int i = 0; i < nodes.size(); ++i)
    for (const std::string& input : nodes.Get(i).input()) {
      if (input.empty() || defined.count(input)) continue;
      const auto found = producer.find(input);
      if (found == producer.end())
        throw Error(cat(where, label(nodes, i), " reads '", input, "', which nothing produces"))
            .hint("the file is damaged or was cut out of a larger model; export it again");
      readers[static_cast<std::size_t>(found->second)].push_back(i);
      ++missing[static_cast<std::size_t>(i)];
    }
  std::vector<int> ready;
  for (int i = 0; i < nodes.size(); ++i)
    if (missing[static_cast<std::size_t>(i)] == 0) ready.push_back(i);
  for (std::size_t k = 0; k < ready.size(); ++k)
    for (int reader : readers[static_cast<std::size_t>(ready[k])])
      if (--missing[static_cast<std::size_t>(reader)] == 0) ready.push_back(reader);
  if (ready.size() < missing.size()) report_cycle(nodes, readers, missing, where);
}

/// Names appear in messages, one line each.
void check_name(const std::string& name) {
  constexpr std::size_t kLongest = 10'000;
  const bool control = std::any_of(name.begin(), name.end(),
                                   [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; });
  if (control || name.size() > kLongest)
    throw Error(
        cat("the name '", one_line(name, 80), "' ", control ? "holds control characters" : "is too long"))
        .hint("the file is damaged; export it again");
}

void check_names(const Nodes& nodes) {
  for (const pb::NodeProto& node : nodes) {
    check_name(node.name());
    check_name(node.op_type());
    check_name(node.domain());
    for (const std::string& name : node.input()) check_name(name);
    for (const std::string& name : node.output()) check_name(name);
    for (const pb::AttributeProto& attribute : node.attribute()) check_name(attribute.name());
  }
}

void check_names(const pb::ModelProto& model) {
  check_names(model.graph().node());
  for (const pb::ValueInfoProto& info : model.graph().input()) check_name(info.name());
  for (const pb::ValueInfoProto& info : model.graph().output()) check_name(info.name());
  for (const pb::TensorProto& tensor : model.graph().initializer()) check_name(tensor.name());
  for (const pb::FunctionProto& function : model.functions()) {
    check_name(function.name());
    check_name(function.domain());
    check_names(function.node());
  }
}

std::string function_key(const std::string& domain, const std::string& name, const std::string& overload) {
  return plain_domain(domain) + "::" + name + (overload.empty() ? "" : ":" + overload);
}

/// Walks the call graph: recursion, depth, and the number of nodes after inlining.
class Calls {
 public:
  explicit Calls(const pb::ModelProto& model) {
    for (const pb::FunctionProto& function : model.functions())
      if (!functions_
               .emplace(function_key(function.domain(), function.name(), function.overload()), &function)
               .second)
        throw Error(cat("function '", function.name(), "' is defined twice"));
  }

  std::uint64_t size(const Nodes& nodes, int depth) {
    std::uint64_t total = 0;
    for (const pb::NodeProto& node : nodes) {
      total += call(node, depth);
      for (const pb::AttributeProto& attribute : node.attribute()) {
        if (attribute.has_g()) total += size(attribute.g().node(), depth);
        for (const pb::GraphProto& graph : attribute.graphs()) total += size(graph.node(), depth);
      }
      if (total > kMaxNodes)
        throw Error(cat("the model has more than ", kMaxNodes, " nodes when its functions are inlined"));
    }
    return total;
  }

  /// Functions that nothing calls must not be recursive either: the checker walks them.
  void all() {
    for (const auto& [key, function] : functions_) body(key, *function, 0);
  }

 private:
  std::uint64_t call(const pb::NodeProto& node, int depth) {
    const std::string key = function_key(node.domain(), node.op_type(), node.overload());
    const auto found = functions_.find(key);
    return found == functions_.end() ? 1 : body(key, *found->second, depth);
  }

  std::uint64_t body(const std::string& key, const pb::FunctionProto& function, int depth) {
    const auto known = sizes_.find(key);
    if (known != sizes_.end()) return known->second;
    if (std::find(stack_.begin(), stack_.end(), key) != stack_.end()) {
      std::string path;
      for (auto it = std::find(stack_.begin(), stack_.end(), key); it != stack_.end(); ++it)
        path += *it + " -> ";
      throw Error(cat("function '", function.name(), "' is recursive: ", one_line(path + key, 300)))
          .hint("ONNX functions must not call themselves");
    }
    if (depth >= kMaxDepth) throw Error(cat("functions are nested more than ", kMaxDepth, " deep"));
    stack_.push_back(key);
    const std::uint64_t result = size(function.node(), depth + 1);
    stack_.pop_back();
    return sizes_[key] = result;
  }

  std::map<std::string, const pb::FunctionProto*> functions_;
  std::map<std::string, std::uint64_t> sizes_;
  std::vector<std::string> stack_;
};

}  // namespace

void check_structure(const pb::ModelProto& model) {
  check_names(model);
  const pb::GraphProto& graph = model.graph();
  std::set<std::string> defined, initializers;
  for (const pb::ValueInfoProto& input : graph.input())
    if (!defined.insert(input.name()).second)
      throw Error(cat("graph input '", input.name(), "' is listed twice"));
  const auto add_initializer = [&](const std::string& name) {
    if (!initializers.insert(name).second)
      throw Error(cat("initializer '", name, "' is defined twice"))
          .hint("names of tensors must be unique; export the model again");
  };
  for (const pb::TensorProto& tensor : graph.initializer()) add_initializer(tensor.name());
  if (graph.sparse_initializer_size() > 0)
    throw Error(cat("initializer '", graph.sparse_initializer(0).values().name(),
                    "' is sparse, which this program does not read"))
        .hint("store it as a dense tensor");
  defined.insert(initializers.begin(), initializers.end());
  check_nodes(graph.node(), defined, "");
  for (const pb::NodeProto& node : graph.node()) defined.insert(node.output().begin(), node.output().end());
  std::set<std::string> outputs;
  for (const pb::ValueInfoProto& output : graph.output()) {
    if (!defined.count(output.name()))
      throw Error(cat("graph output '", output.name(), "' is produced by nothing"));
    if (!outputs.insert(output.name()).second)
      throw Error(cat("graph output '", output.name(), "' is listed twice"));
  }
  for (const pb::FunctionProto& function : model.functions())
    check_nodes(function.node(), {function.input().begin(), function.input().end()},
                cat("function '", function.name(), "': "));
  Calls calls(model);
  calls.size(graph.node(), 0);
  calls.all();
}

}  // namespace onnxddp

#include "distributed/distribute.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "graph/builder.h"
#include "graph/names.h"
#include "graph/nearest.h"
#include "graph/op.h"
#include "graph/passes/passes.h"

namespace onnxddp {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kPlannedCap = 4.0;    // MiB: large enough for bandwidth, small enough to start early
constexpr double kPlannedLast = 0.25;  // MiB: the last bucket is the exposed one
constexpr double kBesideSyncBn =
    1.0;  // MiB: a long reduction would delay the statistics behind it (one FIFO lane)
constexpr double kTorchFirst = 1.0, kTorchCap = 25.0;

/// Inserts nodes behind given ones: collects them by position, then rebuilds the order once.
class Inserter {
 public:
  explicit Inserter(Graph& graph) : graph_(graph) {}
  /// A list of nodes to fill with a Builder; it goes behind `node` (behind everything, if absent).
  std::vector<NodeId>& behind(NodeId node) { return node ? behind_[node] : tail_; }
  void apply() {
    std::vector<NodeId> order;
    for (NodeId id : graph_.order) {
      order.push_back(id);
      const auto at = behind_.find(id);
      if (at != behind_.end()) order.insert(order.end(), at->second.begin(), at->second.end());
    }
    order.insert(order.end(), tail_.begin(), tail_.end());
    graph_.order = std::move(order);
  }

 private:
  Graph& graph_;
  std::unordered_map<NodeId, std::vector<NodeId>> behind_;
  std::vector<NodeId> tail_;
};

std::vector<NodeId> nodes_of(const Graph& graph, std::string_view op) {
  std::vector<NodeId> out;
  for (NodeId id : graph.order)
    if (graph.node(id).op->name == op) out.push_back(id);
  return out;
}

/// Nodes of `op` in groups that one collective can serve: as many of them lie before each member on its
/// longest path, so no path leads from one member to another. The shallowest group first.
std::vector<std::vector<NodeId>> siblings(const Graph& graph, std::string_view op) {
  std::unordered_map<NodeId, int> depth;
  std::map<std::pair<int, DType>, std::vector<NodeId>> groups;
  for (NodeId id : graph.order) {
    const Node& node = graph.node(id);
    int deepest = 0;
    for (ValueId input : node.inputs)
      if (input)
        if (const auto at = depth.find(graph.value(input).producer); at != depth.end())
          deepest = std::max(deepest, at->second);
    if (node.op->name == op) groups[{deepest++, graph.value(node.outputs[0]).type.dtype}].push_back(id);
    depth[id] = deepest;
  }
  std::vector<std::vector<NodeId>> out;
  for (auto& [key, members] : groups) out.push_back(std::move(members));
  return out;
}

/// Moves nodes behind what they read, else leaves the order as it is.
void restore_order(Graph& graph) {
  std::unordered_map<NodeId, std::size_t> position;
  for (std::size_t i = 0; i < graph.order.size(); ++i) position[graph.order[i]] = i;
  std::vector<std::size_t> missing(graph.order.size());
  std::vector<std::vector<std::size_t>> readers(graph.order.size());
  for (std::size_t i = 0; i < graph.order.size(); ++i)
    for (ValueId input : graph.node(graph.order[i]).inputs) {
      const auto at = input ? position.find(graph.value(input).producer) : position.end();
      if (at == position.end()) continue;
      readers[at->second].push_back(i);
      ++missing[i];
    }
  std::set<std::size_t> ready;
  for (std::size_t i = 0; i < missing.size(); ++i)
    if (missing[i] == 0) ready.insert(i);
  std::vector<NodeId> order;
  while (!ready.empty()) {
    const std::size_t next = *ready.begin();
    ready.erase(ready.begin());
    order.push_back(graph.order[next]);
    for (std::size_t reader : readers[next])
      if (--missing[reader] == 0) ready.insert(reader);
  }
  CHECK(order.size() == graph.order.size(), "siblings that depend on each other");
  graph.order = std::move(order);
}

/// Rule 1: batch statistics are gathered from all ranks and merged. Siblings share one gather: their
/// statistics travel end to end.
void merge_statistics(Graph& graph, int ranks) {
  Inserter inserter(graph);
  std::vector<std::pair<ValueId, ValueId>> replaced;
  for (const std::vector<NodeId>& group : siblings(graph, "BatchStats")) {
    Builder builder(graph, inserter.behind(group.back()));
    builder.set_origin(graph.node(group.back()).origin);
    std::vector<Expr> local;
    for (NodeId id : group) local.push_back(builder.expr(graph.node(id).outputs[0]));
    const auto name = [&](std::size_t i, const char* role) {
      return graph.unique_name(graph.value(local[i].id()).name + role);
    };
    const bool alone = group.size() == 1;
    const Expr mine = alone ? local[0] : builder.call("Concat", local, {{"axis", 0}}, name(0, ".siblings"));
    const Expr all = builder.call("AllGather", {mine}, {{"ranks", std::int64_t{ranks}}}, name(0, ".all"));
    std::int64_t at = 0;
    for (std::size_t i = 0; i < group.size(); ++i) {
      const std::int64_t end = at + local[i].shape()[0].value();
      const Attrs piece{{"axes", Ints{1}}, {"starts", Ints{at}}, {"ends", Ints{end}}, {"steps", Ints{1}}};
      const Expr own = alone ? all : builder.call("Slice", {all}, piece, name(i, ".ranks"));
      replaced.emplace_back(local[i].id(), builder.call("MergeStats", {own}, {}, name(i, ".merged")).id());
      at = end;
    }
  }
  for (const auto& [local, merged] : replaced) graph.replace_uses(local, merged);
  inserter.apply();
  restore_order(graph);
}

/// Rule 2: the gradient sums that a training batch norm's backward reads are summed over ranks, those of
/// siblings by one all-reduce. Where such a sum is the whole gradient of a scale or bias, the reduced value
/// is that gradient; where more is added to it, the local sum goes the usual way through a bucket.
std::set<ValueId> reduce_batch_norm_sums(Graph& graph) {
  std::set<ValueId> wanted;
  for (NodeId id : nodes_of(graph, "BatchNormGradApply")) {
    const std::vector<ValueId>& inputs = graph.node(id).inputs;
    if (inputs.size() > 4) wanted.insert(inputs[4]);
  }
  Inserter inserter(graph);
  std::map<ValueId, ValueId> reduced;
  for (std::vector<NodeId>& group : siblings(graph, "BatchNormGradSums")) {
    std::erase_if(group, [&](NodeId id) { return wanted.count(graph.node(id).outputs[0]) == 0; });
    if (group.empty()) continue;
    Builder builder(graph, inserter.behind(group.back()));
    builder.set_origin(graph.node(group.back()).origin);
    std::vector<ValueId> sums;
    std::vector<std::string> names;
    for (NodeId id : group)
      for (ValueId sum : graph.node(id).outputs) {
        sums.push_back(sum);
        names.push_back(graph.unique_name(graph.value(sum).name + ".sum"));
      }
    const std::vector<ValueId> totals = builder.emit("AllReduce", sums, {}, names, sums.size());
    for (std::size_t i = 0; i < sums.size(); ++i) reduced.emplace(sums[i], totals[i]);
  }
  for (NodeId id : nodes_of(graph, "BatchNormGradApply"))
    for (std::size_t i = 4; i < graph.node(id).inputs.size(); ++i)
      if (const auto at = reduced.find(graph.node(id).inputs[i]); at != reduced.end())
        graph.node(id).inputs[i] = at->second;
  std::set<ValueId> done;
  for (const auto& [param, gradient] : gradients(graph)) {
    const auto at = reduced.find(gradient);
    if (at == reduced.end()) continue;
    set_gradient(graph, param, at->second);
    done.insert(param);
  }
  inserter.apply();
  restore_order(graph);
  return done;
}

struct Bucket {
  std::vector<std::pair<ValueId, ValueId>> members;  // param, gradient
};

std::size_t gradient_bytes(const Graph& graph, ValueId gradient) {
  const TensorType& type = graph.value(gradient).type;
  return static_cast<std::size_t>(numel(type.shape).value()) * dtype_size(type.dtype);
}

/// The gradients in the policy's order: of production, or PyTorch's reversed registration.
std::vector<std::pair<ValueId, ValueId>> ordered_gradients(const Graph& graph, const std::set<ValueId>& done,
                                                           const std::string& policy) {
  std::vector<std::pair<ValueId, ValueId>> out = gradients(graph);
  std::erase_if(out, [&](const auto& item) { return done.count(item.first) > 0; });
  if (policy == "torch")
    std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return b.first < a.first; });
  return out;
}

std::vector<Bucket> make_buckets(const Graph& graph, const std::set<ValueId>& done,
                                 const DistributeOptions& options, bool beside_sync) {
  const auto grads = ordered_gradients(graph, done, options.bucket_policy);
  std::vector<std::size_t> bytes;
  for (const auto& [param, gradient] : grads) bytes.push_back(gradient_bytes(graph, gradient));
  double cap = options.bucket_mb;
  if (cap == 0 && beside_sync && options.bucket_policy == "planned") cap = kBesideSyncBn;
  std::vector<Bucket> out;
  std::size_t next = 0;
  for (std::size_t count : plan_buckets(bytes, options.bucket_policy, cap)) {
    Bucket bucket;
    for (std::size_t i = 0; i < count; ++i, ++next) {
      // One AllReduce has one element type.
      const auto dtype = [&](const auto& item) { return graph.value(item.second).type.dtype; };
      if (!bucket.members.empty() && dtype(bucket.members[0]) != dtype(grads[next])) {
        out.push_back(std::move(bucket));
        bucket = {};
      }
      bucket.members.push_back(grads[next]);
    }
    out.push_back(std::move(bucket));
  }
  return out;
}

/// Rule 3: every bucket becomes one AllReduce right behind the last of its gradients; loss and stop flag ride
/// in the last one.
void reduce_gradients(Graph& graph, const std::set<ValueId>& done, const DistributeOptions& options,
                      bool beside_sync) {
  std::unordered_map<NodeId, std::size_t> position;
  for (std::size_t i = 0; i < graph.order.size(); ++i) position[graph.order[i]] = i;
  std::vector<Bucket> buckets = make_buckets(graph, done, options, beside_sync);
  if (buckets.empty()) buckets.emplace_back();
  Inserter inserter(graph);
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    std::vector<ValueId> operands;
    std::vector<std::string> names;
    NodeId last;
    const auto add = [&](ValueId value, const std::string& name) {
      operands.push_back(value);
      names.push_back(graph.unique_name(name));
      const NodeId producer = graph.value(value).producer;
      if (producer && (!last || position[producer] > position[last])) last = producer;
    };
    for (const auto& [param, gradient] : buckets[b].members) add(gradient, graph.value(param).name + ".sum");
    std::vector<std::size_t> riders;  // indices of outputs that ride along
    if (b + 1 == buckets.size()) {
      for (std::size_t i = 0; i < graph.outputs.size(); ++i) {
        const Output& output = graph.outputs[i];
        if (std::find(options.extra.begin(), options.extra.end(), output.name) == options.extra.end() &&
            output.name != "stop")
          continue;
        riders.push_back(i);
        add(output.value, output.name + ".total");
      }
    }
    if (operands.empty()) continue;
    Builder builder(graph, inserter.behind(last));
    const std::vector<ValueId> sums = builder.emit("AllReduce", operands, {}, names, operands.size());
    for (std::size_t i = 0; i < buckets[b].members.size(); ++i)
      set_gradient(graph, buckets[b].members[i].first, sums[i]);
    for (std::size_t i = 0; i < riders.size(); ++i)
      graph.outputs[riders[i]].value = sums[buckets[b].members.size() + i];
  }
  inserter.apply();
}

}  // namespace

std::vector<std::size_t> plan_buckets(const std::vector<std::size_t>& bytes, const std::string& policy,
                                      double bucket_mb) {
  if (policy != "planned" && policy != "torch")
    throw usage_error(cat("--bucket-policy must be planned or torch, not '", policy, "'"));
  std::vector<std::size_t> counts;
  std::size_t tail = 0;  // how many gradients the small last bucket of `planned` holds
  const bool torch = policy == "torch";
  const double cap = (bucket_mb > 0 ? bucket_mb : torch ? kTorchCap : kPlannedCap) * kMiB;
  const double first_cap = bucket_mb > 0 || !torch ? cap : kTorchFirst * kMiB;
  if (!torch) {
    double held = 0;
    while (tail < bytes.size() &&
           held + static_cast<double>(bytes[bytes.size() - 1 - tail]) <= kPlannedLast * kMiB)
      held += static_cast<double>(bytes[bytes.size() - 1 - tail++]);
  }
  double held = 0;
  std::size_t count = 0;
  for (std::size_t i = 0; i + tail < bytes.size(); ++i) {
    held += static_cast<double>(bytes[i]);
    ++count;
    if (held < (counts.empty() ? first_cap : cap)) continue;
    counts.push_back(count);
    held = 0;
    count = 0;
  }
  // What is left over is smaller than a bucket: alone if nothing follows, else it joins the tail only when
  // that stays small enough to be sent in one go.
  if (count > 0 && tail > 0 && held <= cap / 4) {
    tail += count;
    count = 0;
  }
  if (count > 0) counts.push_back(count);
  if (tail > 0) counts.push_back(tail);
  return counts;
}

void distribute(Graph& graph, const DistributeOptions& options) {
  plan_buckets({}, options.bucket_policy,
               options.bucket_mb);  // checks the policy's name at any number of ranks
  if (options.ranks <= 1) return;
  const bool sync = options.sync_batch_norm && !nodes_of(graph, "BatchStats").empty();
  std::set<ValueId> done;
  if (sync) {
    merge_statistics(graph, options.ranks);
    done = reduce_batch_norm_sums(graph);
  }
  if (!options.reduce_gradients) return;
  if (options.stop_flag) {
    DType dtype = DType::f32;
    for (const Output& output : graph.outputs)
      if (output.name == "loss") dtype = graph.value(output.value).type.dtype;
    claim_name(graph, "stop.request");
    graph.outputs.push_back({"stop", graph.add_param("stop.request", {dtype, {}}, Kind::state)});
  }
  reduce_gradients(graph, done, options, sync);
}

}  // namespace onnxddp

// Passes are functions Graph& -> void; a Pipeline runs them in order and verifies after each.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

struct Pass {
  std::string name;  // the stage name of `show --stage`
  std::function<void(Graph&)> run;
};

class Pipeline {
 public:
  void add(std::string name, std::function<void(Graph&)> run) {
    passes_.push_back({std::move(name), std::move(run)});
  }
  /// Runs and verifies every pass up to and including stage `stop` (all when empty). Throws Error for an
  /// unknown stage.
  void run(Graph& graph, std::string_view stop = {}) const;
  std::vector<std::string> stages() const;

 private:
  std::vector<Pass> passes_;
};

/// Throws InternalError naming the first thing that is wrong: order, single assignment, names, types against
/// infer, attributes, updates.
void verify(const Graph& graph);

/// Replaces symbols by numbers in every type, attribute and symbolic content, re-infers, and throws Error
/// where an equality that was undecidable turns out false. Symbols that are not bound stay.
void bind_dims(Graph& graph, const DimBindings& bindings);
/// All symbols in the graph's inputs.
std::vector<std::string> free_symbols(const Graph& graph);

/// Runs one node on constant inputs and returns its outputs; the executor supplies it (kernels).
using Evaluator = std::function<std::vector<HostTensor>(const Graph&, NodeId)>;

}  // namespace onnxddp

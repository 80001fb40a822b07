// Running single kernels of the CPU in tests: any layout, any number of threads, poisoned outputs.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "executor/kernel.h"
#include "graph/op.h"
#include "graph/registry.h"
#include "graph/text.h"

namespace onnxddp::testing {

/// Calls f(entry, sample text) for every sample of the registry, with the text in every failure.
template <class F>
void each_sample(const F& f) {
  for (const OpDef* op : all_ops()) {
    for (const std::string& text : op->samples) {
      SCOPED_TRACE(text);
      try {
        f(*op, text);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
  }
}

struct RunOptions {
  bool nhwc = false;  // images come in N,H,W,C where the kernel takes them so
  int threads = 1;
  std::pair<int, int> in_place{-1, -1};  // {input, output} that share memory
};

/// Runs the node on copies of `inputs`. Outputs are filled with a pattern first and have a margin behind
/// them; EXPECTs that every element gets a value that does not depend on the pattern, and that the margins
/// and other inputs stay as they are.
std::vector<HostTensor> run_node(const Graph& graph, NodeId node, const std::vector<HostTensor>& inputs,
                                 const RunOptions& options = {});

/// Runs `OP(types…) {attributes}` (the sample syntax) on these inputs, one for each type that has no
/// contents.
std::vector<HostTensor> run_text(const std::string& sample, const std::vector<HostTensor>& inputs,
                                 const RunOptions& options = {});

/// Inputs of the node: constants as they are, others uniformly random in the sample's ranges.
std::vector<HostTensor> random_inputs(const Sample& sample, unsigned seed);
HostTensor random_tensor(DType dtype, const Ints& shape, unsigned seed, double low = -1, double high = 1);

/// Largest |a-b| divided by max(1, largest |b|); infinite where types differ or one is NaN and the other not.
double difference(const HostTensor& a, const HostTensor& b);

/// Runs all nodes in order; `values` holds the inputs and params. Returns the graph's outputs by name.
std::map<std::string, HostTensor> run_graph(const Graph& graph, std::map<ValueId, HostTensor> values);

}  // namespace onnxddp::testing

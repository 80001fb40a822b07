// A batch dimension that the exporter fixed to a number is made symbolic where the model's constants allow
// it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/op.h"
#include "importer/onnx/proto.h"

namespace onnxddp {

/// One way to make the batch symbolic; the last way is to leave it.
struct BatchChange {
  std::string symbol;        // empty: nothing changes
  std::int64_t old = 0;      // the number
  bool expand_ones = false;  // also Expand and ConstantOfShape to a leading 1

  /// Whether a leading dimension of an input becomes symbolic.
  bool covers(std::int64_t dimension) const { return !symbol.empty() && dimension == old; }
  /// Replaces the constant shape that a Reshape, Expand or ConstantOfShape reads where its first entry is the
  /// old batch.
  void apply(OnnxNode& node, Graph& graph) const;
  /// Throws Error unless every output that had the old batch has the symbol.
  void verify(const pb::ModelProto& model, const Graph& graph) const;
};

/// The number that leads the first input and an output, if there is one.
std::optional<std::int64_t> fixed_batch(const pb::ModelProto& model);
/// The ways to try, best first.
std::vector<BatchChange> batch_changes(const pb::ModelProto& model);
/// How many convolutions say that an exporter folded a batch norm into them.
int folded_batch_norms(const pb::ModelProto& model);

}  // namespace onnxddp

// Symbols from the shapes of what is fed.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "executor/plan/session.h"

namespace onnxddp {

/// A program's inputs.
using Inputs = std::vector<std::pair<std::string, TensorType>>;

/// The values of `symbols` for which the inputs of `program` have the types of `feeds`: each dimension that
/// is linear in one unknown symbol (`N`, `2*M+1`) is solved for it, then all are compared. Throws Error
/// naming both types.
DimBindings bind_feeds(const std::string& program, const Inputs& inputs,
                       const std::vector<std::string>& symbols, const Feeds& feeds);

}  // namespace onnxddp

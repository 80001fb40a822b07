// Names by which the program finds values of its own in a finished graph.
#pragma once

#include <string>

#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

/// Frees the name for a value of the program's own: a computed value or constant that holds it is renamed.
/// Throws Error where it belongs to an input, a parameter or a buffer, whose names are the user's.
void claim_name(Graph& graph, const std::string& name);

}  // namespace onnxddp

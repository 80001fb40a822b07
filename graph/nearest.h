// "did you mean …?" for unknown ops, flags, keys.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// The known word nearest to `word` (Levenshtein distance at most a third of its length, at least 2), or "".
std::string nearest(std::string_view word, const std::vector<std::string>& known);
/// "; did you mean 'X'?" or "".
std::string did_you_mean(std::string_view word, const std::vector<std::string>& known);

}  // namespace onnxddp

// Do all ranks mean the same? Asked before the first step, so that a difference is an error and no hang.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "distributed/communicator.h"

namespace ONNXDDP_API onnxddp {

/// Compares named texts (the graph's dump, options, fingerprint of the data) of all ranks: one small
/// all-gather when they are equal. Otherwise throws the same Error on every rank: the first item that
/// differs, and the first differing line of both sides.
void check_agreement(Communicator& communicator,
                     const std::vector<std::pair<std::string, std::string>>& items);

}  // namespace onnxddp

// The communicators that exist, for the factory.
#pragma once

#include <memory>

#include "distributed/communicator.h"

namespace onnxddp {

/// Processes over TCP by Gloo; options.store is the meeting point.
std::unique_ptr<Communicator> make_gloo_communicator(const CommunicatorOptions& options);

}  // namespace onnxddp

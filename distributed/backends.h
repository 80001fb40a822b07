// The communicators that exist, for the factory. `scope` is the part of the store that this communicator
// meets in.
#pragma once

#include <memory>
#include <string>

#include "distributed/communicator.h"

namespace onnxddp {

/// Processes over TCP by Gloo.
std::unique_ptr<Communicator> make_gloo_communicator(const CommunicatorOptions& options,
                                                     const std::string& scope);

/// Processes of one machine over shared memory; nothing, on every rank, when the ranks do not share one.
std::unique_ptr<Communicator> try_shm_communicator(const CommunicatorOptions& options,
                                                   const std::string& scope);

}  // namespace onnxddp

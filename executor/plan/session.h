// Session: runs plans of several programs over shared state on one device.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "distributed/communicator.h"
#include "executor/device.h"
#include "executor/plan/plan.h"

namespace ONNXDDP_API onnxddp {

using Feeds = std::map<std::string, HostTensor, std::less<>>;

class Session {
 public:
  Session(Device& device, Communicator& communicator);
  ~Session();

  /// Registers a program (an unbound graph); its states are allocated, zero-filled unless set.
  void add_program(const std::string& name, const Graph& graph);
  /// The graph of a program.
  const Graph& program(const std::string& name) const;
  /// Sets / reads a param or state by name. Throws Error on a type mismatch.
  void set_state(const std::string& name, const HostTensor& value);
  HostTensor get_state(const std::string& name) const;
  /// Small state values written every step (hyper-parameters, denominators): no-op if the name is not in any
  /// program.
  void set_scalar(const std::string& name, double value);
  std::vector<std::string> state_names() const;
  bool has_state(const std::string& name) const;

  /// Runs one step: binds the symbols to the feeds' shapes (plan cache of 8, least recently used goes),
  /// copies feeds, runs. Returns the graph outputs named in `fetch` (all when empty).
  Feeds run(const std::string& program, const Feeds& feeds, const std::vector<std::string>& fetch = {});
  /// The plan for these symbols; made if it is not cached.
  const Plan& plan(const std::string& program, const DimBindings& dims);
  /// Bytes of state, largest arena, feeds and constants held.
  std::size_t memory_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace onnxddp

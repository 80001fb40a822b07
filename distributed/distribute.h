// The distribution pass: three rewrite rules after autodiff; the only graph code that knows that ranks exist.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace ONNXDDP_API onnxddp {

struct DistributeOptions {
  int ranks = 1;
  bool sync_batch_norm = false;
  std::string bucket_policy = "planned";  // planned | torch
  double bucket_mb = 0;                   // 0: the policy's default
  std::vector<std::string> extra = {
      "loss"};            // scalar outputs that ride in the last bucket and become sums over ranks
  bool stop_flag = true;  // state `stop.request` (0 or 1, set by the trainer) rides along: output `stop`
  bool reduce_gradients = true;  // false: a micro program, whose gradients stay local
};
/// Rewrites the graph for `ranks` ranks: every BatchStats gets AllGather + MergeStats (with sync_batch_norm),
/// its gradient sums an AllReduce, parameter gradients (outputs `P.grad`) bucketed AllReduces (`P.sum`). One
/// rank: unchanged.
void distribute(Graph& graph, const DistributeOptions& options);

/// Bucket sizes in bytes by policy, from gradient sizes in production order: how many consecutive gradients
/// each holds.
std::vector<std::size_t> plan_buckets(const std::vector<std::size_t>& bytes, const std::string& policy,
                                      double bucket_mb);

}  // namespace onnxddp

// Convolutions by cuDNN 9's graph API. A plan is chosen once a shape, from a device or from its description: building needs no
// GPU, running does.
#pragma once

#include <cuda_runtime_api.h>
#include <cudnn_graph.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "executor/cuda/blas.h"
#include "graph/types.h"

namespace onnxddp::cuda {

enum class ConvKind : std::uint8_t { forward, data_grad, weight_grad };

/// A 2-D convolution. Images are NHWC in memory, weights KRSC (k, kernel row, kernel column, c / group); sums are formed in float.
struct ConvProblem {
  ConvKind kind = ConvKind::forward;
  DType dtype = DType::f32;  // of all operands: f32 or bf16
  std::int64_t n = 1, c = 1, h = 1, w = 1;  // image x
  std::int64_t k = 1, r = 1, s = 1;         // weight [k, c / group, r, s]
  std::int64_t top = 0, left = 0, bottom = 0, right = 0;  // pads
  std::int64_t stride_h = 1, stride_w = 1, dilation_h = 1, dilation_w = 1, group = 1;

  std::int64_t out_h() const { return (h + top + bottom - dilation_h * (r - 1) - 1) / stride_h + 1; }
  std::int64_t out_w() const { return (w + left + right - dilation_w * (s - 1) - 1) / stride_w + 1; }
};

struct ConvOptions {
  FloatMath math = FloatMath::strict;  // f32 only
  bool deterministic = true;           // only engines with the same bits in every run
  std::size_t workspace_limit = std::size_t{192} << 20;  // an upper bound: most plans need less than 1 MiB
};

/// "forward f32 x[32,64,56,56] w[64,64,3,3] …": every field of both, for cache keys and messages.
std::string describe(const ConvProblem& problem, const ConvOptions& options);

/// A descriptor of cuDNN's graph API.
using CudnnDescriptor = Owned<cudnnBackendDescriptor_t, cudnnBackendDestroyDescriptor>;

/// What plans are made for: the current device, or one that is only described.
class Cudnn {
 public:
  /// The current device; plans run on `stream`.
  explicit Cudnn(cudaStream_t stream);
  /// A device that need not be here: cuDNN's own description of it (see description()). Throws Error if cuDNN refuses it.
  explicit Cudnn(const std::string& description);

  /// cuDNN's description of the device, JSON.
  const std::string& description() const { return description_; }
  /// Part of the key of every plan: cuDNN's version and a digest of the description.
  std::string identity() const;
  /// Null for a described device.
  cudnnHandle_t handle() const { return handle_.get(); }
  cudnnBackendDescriptor_t properties() const { return properties_.get(); }

  /// 91900 for 9.19.0.
  static std::size_t version() { return cudnnGetVersion(); }

 private:
  void read_description();

  Owned<cudnnHandle_t, cudnnDestroy> handle_;
  CudnnDescriptor properties_;
  std::string description_;
};

/// How to compute one convolution.
class ConvPlan {
 public:
  /// The first engine of cuDNN's heuristics (then of its fallback list) that builds, is allowed by the options and fits the
  /// workspace. Throws Error if there is none.
  static ConvPlan build(Cudnn& cudnn, const ConvProblem& problem, const ConvOptions& options);
  /// A plan that serialise() wrote for the same problem, options and Cudnn::identity(); nothing if cuDNN refuses it.
  static std::optional<ConvPlan> load(Cudnn& cudnn, const std::string& serialised, std::size_t workspace_limit);

  std::size_t workspace_bytes() const { return workspace_bytes_; }
  /// A few kilobytes of text for load().
  std::string serialise() const;
  /// Numbers of cudnnBackendNumericalNote_t of the chosen engine; unknown (empty) for a loaded plan.
  const std::vector<cudnnBackendNumericalNote_t>& notes() const { return notes_; }

  /// Queues result = convolution on the stream of `cudnn`, which must be the one of build or load, on a device.
  ///   forward:     (x, w) -> y       data_grad:  (dy, w) -> dx       weight_grad:  (dy, x) -> dw
  /// Operands 16-byte aligned; workspace: workspace_bytes() of device memory.
  void run(Cudnn& cudnn, const void* first, const void* second, void* result, void* workspace) const;

 private:
  ConvPlan() = default;
  CudnnDescriptor plan_;
  std::size_t workspace_bytes_ = 0;
  std::vector<cudnnBackendNumericalNote_t> notes_;
};

/// Serialised plans by key, and where they are kept between runs.
class ConvPlanCache {
 public:
  /// The stored plan where it loads, else a new one, which is stored.
  ConvPlan get(Cudnn& cudnn, const ConvProblem& problem, const ConvOptions& options);
  /// Plans that get() has loaded instead of built.
  int hits() const { return hits_; }
  std::size_t size() const { return plans_.size(); }

  /// Adds the plans of a file that save() wrote. A missing file has none; a damaged one throws Error.
  void load(const std::string& path);
  /// Replaces the file at once, never half.
  void save(const std::string& path) const;

 private:
  std::map<std::string, std::string> plans_;
  int hits_ = 0;
};

}  // namespace onnxddp::cuda

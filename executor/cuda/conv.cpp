#include "executor/cuda/conv.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "executor/cuda/status.h"

namespace onnxddp::cuda {
namespace {

// Unique ids of the operands in a plan: the two inputs and the result, in the order of ConvPlan::run.
constexpr std::int64_t kFirst = 1, kSecond = 2, kResult = 3;
constexpr std::int64_t kAlignment = 16;

CudnnDescriptor make(cudnnBackendDescriptorType_t type) {
  CudnnDescriptor descriptor;
  CUDA_OK(cudnnBackendCreateDescriptor(type, descriptor.out()));
  return descriptor;
}

template <class T>
void set(const CudnnDescriptor& d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
         const std::vector<T>& values) {
  CUDA_OK(
      cudnnBackendSetAttribute(d.get(), name, type, static_cast<std::int64_t>(values.size()), values.data()));
}
template <class T>
void set(const CudnnDescriptor& d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
         const T& value) {
  CUDA_OK(cudnnBackendSetAttribute(d.get(), name, type, 1, &value));
}
void set(const CudnnDescriptor& d, cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
  set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.get());
}
void finalise(const CudnnDescriptor& d) { CUDA_OK(cudnnBackendFinalize(d.get())); }

/// A char array, as the JSON attributes are, without a final 0.
std::string text_of(const CudnnDescriptor& d, cudnnBackendAttributeName_t name) {
  std::int64_t count = 0;
  CUDA_OK(cudnnBackendGetAttribute(d.get(), name, CUDNN_TYPE_CHAR, 0, &count, nullptr));
  std::string text(static_cast<std::size_t>(count), '\0');
  CUDA_OK(cudnnBackendGetAttribute(d.get(), name, CUDNN_TYPE_CHAR, count, &count, text.data()));
  while (!text.empty() && text.back() == '\0') text.pop_back();
  return text;
}

void set_text(const CudnnDescriptor& d, cudnnBackendAttributeName_t name, const std::string& text) {
  CUDA_OK(cudnnBackendSetAttribute(d.get(), name, CUDNN_TYPE_CHAR, static_cast<std::int64_t>(text.size() + 1),
                                   text.c_str()));
}

/// Logical dims n, c, h, w; c is the fastest in memory.
CudnnDescriptor tensor(std::int64_t id, DType dtype, std::int64_t n, std::int64_t c, std::int64_t h,
                       std::int64_t w) {
  CudnnDescriptor d = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE,
      dtype == DType::f32 ? CUDNN_DATA_FLOAT : CUDNN_DATA_BFLOAT16);
  set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, std::vector<std::int64_t>{n, c, h, w});
  set(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::vector<std::int64_t>{h * w * c, 1, w * c, c});
  set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment);
  finalise(d);
  return d;
}

CudnnDescriptor convolution(const ConvProblem& p) {
  using Pair = std::vector<std::int64_t>;
  CudnnDescriptor d = make(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  set(d, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  set(d, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
  set(d, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, std::int64_t{2});
  set(d, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, Pair{p.top, p.left});
  set(d, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, Pair{p.bottom, p.right});
  set(d, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, Pair{p.stride_h, p.stride_w});
  set(d, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, Pair{p.dilation_h, p.dilation_w});
  finalise(d);
  return d;
}

/// The attributes of the three operations differ in their names only.
struct OperationNames {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t alpha, beta, conv, first, second, result;
};
OperationNames names_of(ConvKind kind) {
  switch (kind) {
    case ConvKind::forward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y};
    case ConvKind::data_grad:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX};
    case ConvKind::weight_grad: break;
  }
  return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW};
}

/// An operation graph and the descriptors that it refers to.
struct ConvGraph {
  CudnnDescriptor first, second, result, convolution, operation, graph;
};

ConvGraph make_graph(Cudnn& cudnn, const ConvProblem& p) {
  const auto image = [&](std::int64_t id) { return tensor(id, p.dtype, p.n, p.c, p.h, p.w); };
  const auto weight = [&](std::int64_t id) { return tensor(id, p.dtype, p.k, p.c / p.group, p.r, p.s); };
  const auto outcome = [&](std::int64_t id) { return tensor(id, p.dtype, p.n, p.k, p.out_h(), p.out_w()); };
  ConvGraph g;
  g.first = p.kind == ConvKind::forward ? image(kFirst) : outcome(kFirst);
  g.second = p.kind == ConvKind::weight_grad ? image(kSecond) : weight(kSecond);
  g.result = p.kind == ConvKind::forward     ? outcome(kResult)
             : p.kind == ConvKind::data_grad ? image(kResult)
                                             : weight(kResult);
  g.convolution = convolution(p);
  const OperationNames names = names_of(p.kind);
  g.operation = make(names.type);
  set(g.operation, names.alpha, CUDNN_TYPE_FLOAT, 1.0f);
  set(g.operation, names.beta, CUDNN_TYPE_FLOAT, 0.0f);
  set(g.operation, names.conv, g.convolution);
  set(g.operation, names.first, g.first);
  set(g.operation, names.second, g.second);
  set(g.operation, names.result, g.result);
  finalise(g.operation);
  g.graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  set(g.graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, g.operation);
  if (cudnn.handle() != nullptr)
    set(g.graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, cudnn.handle());
  finalise(g.graph);
  return g;
}

/// The engine configurations that cuDNN proposes, best first.
std::vector<CudnnDescriptor> proposals(Cudnn& cudnn, const ConvGraph& graph, cudnnBackendHeurMode_t mode) {
  CudnnDescriptor heuristics = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.graph);
  set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (cudnn.handle() == nullptr)
    set(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, cudnn.properties());
  if (cudnnBackendFinalize(heuristics.get()) != CUDNN_STATUS_SUCCESS) return {};
  std::int64_t count = 0;
  CUDA_OK(cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr));
  std::vector<CudnnDescriptor> result;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i) {
    result.push_back(make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    raw.push_back(result.back().get());
  }
  if (count == 0) return result;
  CUDA_OK(cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, raw.data()));
  result.resize(static_cast<std::size_t>(count));
  return result;
}

template <class Note, int kMost>
std::vector<Note> engine_notes(const CudnnDescriptor& config, cudnnBackendAttributeName_t name,
                               cudnnBackendAttributeType_t type) {
  CudnnDescriptor engine = make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.get();
  std::int64_t count = 0;
  CUDA_OK(cudnnBackendGetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                   1, &count, &raw));
  std::vector<Note> notes(kMost);
  count = 0;
  CUDA_OK(cudnnBackendGetAttribute(engine.get(), name, type, kMost, &count, notes.data()));
  notes.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, kMost)));
  return notes;
}

template <class Note>
bool has(const std::vector<Note>& notes, Note note) {
  return std::find(notes.begin(), notes.end(), note) != notes.end();
}

bool allowed(const std::vector<cudnnBackendNumericalNote_t>& notes, const ConvProblem& p,
             const ConvOptions& o) {
  if (o.deterministic && has(notes, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) return false;
  if (has(notes, CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)) return false;
  const bool strict = p.dtype == DType::f32 &&
                      o.math == FloatMath::strict;  // on floats, tensor cores and conversions mean TF32
  return !strict || !(has(notes, CUDNN_NUMERICAL_NOTE_TENSOR_CORE) ||
                      has(notes, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) ||
                      has(notes, CUDNN_NUMERICAL_NOTE_WINOGRAD) || has(notes, CUDNN_NUMERICAL_NOTE_FFT));
}

std::size_t workspace_of(const CudnnDescriptor& plan) {
  std::int64_t bytes = 0, count = 0;
  CUDA_OK(cudnnBackendGetAttribute(plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                   &count, &bytes));
  return static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0));
}

void set_target(const CudnnDescriptor& plan, const Cudnn& cudnn) {
  if (cudnn.handle() != nullptr)
    set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, cudnn.handle());
  else
    set(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, cudnn.properties());
}

/// FNV-1a, 64 bits: a file key, not a secret.
std::uint64_t digest(const std::string& text) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace

std::string describe(const ConvProblem& p, const ConvOptions& o) {
  static constexpr const char* kKinds[] = {"forward", "data_grad", "weight_grad"};
  return cat(kKinds[static_cast<int>(p.kind)], " ", dtype_name(p.dtype), " x[", p.n, ",", p.c, ",", p.h, ",",
             p.w, "] w[", p.k, ",", p.c / p.group, ",", p.r, ",", p.s, "] pads[", p.top, ",", p.left, ",",
             p.bottom, ",", p.right, "] strides[", p.stride_h, ",", p.stride_w, "] dilations[", p.dilation_h,
             ",", p.dilation_w, "] group ", p.group, o.math == FloatMath::strict ? " strict" : " tf32",
             o.deterministic ? " deterministic" : "", " workspace ", o.workspace_limit);
}

Cudnn::Cudnn(cudaStream_t stream) {
  CUDA_OK(cudnnCreate(handle_.out()));
  CUDA_OK(cudnnSetStream(handle_.get(), stream));
  properties_ = make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  set(properties_, CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, handle_.get());
  finalise(properties_);
  description_ = text_of(properties_, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION);
}

Cudnn::Cudnn(const std::string& description) : description_(description) {
  properties_ = make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  set_text(properties_, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, description);
  finalise(properties_);
}

std::string Cudnn::identity() const {
  return cat("cudnn ", version(), " device ", std::hex, digest(description_));
}

ConvPlan ConvPlan::build(Cudnn& cudnn, const ConvProblem& problem, const ConvOptions& options) {
  const ConvGraph graph = make_graph(cudnn, problem);
  std::size_t proposed = 0, refused = 0, large = 0;
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (CudnnDescriptor& config : proposals(cudnn, graph, mode)) {
      ++proposed;
      ConvPlan plan;
      plan.notes_ = engine_notes<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT>(
          config, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE);
      const auto behaviour = engine_notes<cudnnBackendBehaviorNote_t, CUDNN_BEHAVIOR_NOTE_TYPE_COUNT>(
          config, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE);
      // Engines that compile at run time need a driver to build, and a compiler on the user's machine: left
      // out everywhere, so that what the tests build from a description is what a device gets.
      if (!allowed(plan.notes_, problem, options) ||
          has(behaviour, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION)) {
        ++refused;
        continue;
      }
      plan.plan_ = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      set(plan.plan_, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
      set_target(plan.plan_, cudnn);
      if (cudnnBackendFinalize(plan.plan_.get()) != CUDNN_STATUS_SUCCESS) continue;
      plan.workspace_bytes_ = workspace_of(plan.plan_);
      if (plan.workspace_bytes_ <= options.workspace_limit) return plan;
      ++large;
    }
  }
  throw Error(cat("cuDNN has no plan for this convolution: of ", proposed, " engines, ", refused,
                  " are not allowed, ", large, " need too much workspace"))
      .at(describe(problem, options))
      .hint("allow TF32, or a larger workspace");
}

std::optional<ConvPlan> ConvPlan::load(Cudnn& cudnn, const std::string& serialised,
                                       std::size_t workspace_limit) {
  ConvPlan plan;
  plan.plan_ = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  set_target(plan.plan_, cudnn);
  if (cudnnBackendSetAttribute(plan.plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
                               CUDNN_TYPE_CHAR, static_cast<std::int64_t>(serialised.size() + 1),
                               serialised.c_str()) != CUDNN_STATUS_SUCCESS ||
      cudnnBackendFinalize(plan.plan_.get()) != CUDNN_STATUS_SUCCESS)
    return std::nullopt;
  plan.workspace_bytes_ = workspace_of(plan.plan_);
  if (plan.workspace_bytes_ > workspace_limit) return std::nullopt;
  return plan;
}

std::string ConvPlan::serialise() const {
  return text_of(plan_, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION);
}

void ConvPlan::run(Cudnn& cudnn, const void* first, const void* second, void* result, void* workspace) const {
  CHECK(cudnn.handle() != nullptr, "a convolution on a device that is only described");
  CudnnDescriptor pack = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  // cuDNN takes the inputs as void*, too.
  set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
      std::vector<void*>{const_cast<void*>(first), const_cast<void*>(second), result});
  set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64,
      std::vector<std::int64_t>{kFirst, kSecond, kResult});
  set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  finalise(pack);
  CUDA_OK(cudnnBackendExecute(cudnn.handle(), plan_.get(), pack.get()));
}

ConvPlan ConvPlanCache::get(Cudnn& cudnn, const ConvProblem& problem, const ConvOptions& options) {
  const std::string key = cudnn.identity() + " " + describe(problem, options);
  if (const auto found = plans_.find(key); found != plans_.end()) {
    if (std::optional<ConvPlan> plan = ConvPlan::load(cudnn, found->second, options.workspace_limit)) {
      ++hits_;
      return std::move(*plan);
    }
  }
  ConvPlan plan = ConvPlan::build(cudnn, problem, options);
  plans_[key] = plan.serialise();
  return plan;
}

// The file: a line of its kind, then for each plan "KEY_BYTES PLAN_BYTES\n", key, plan, "\n".
namespace {
constexpr const char* kFileKind = "onnx-ddp convolution plans 1";
constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // of a key or a plan

[[noreturn]] void damaged(const std::string& path) {
  throw Error(cat("the file of convolution plans is damaged: ", path)).hint("delete it: it is made again");
}
}  // namespace

void ConvPlanCache::load(const std::string& path) {
  std::error_code none;
  if (!std::filesystem::exists(path, none)) return;
  std::ifstream file(path, std::ios::binary);
  std::string line;
  if (!std::getline(file, line) || line != kFileKind) damaged(path);
  while (std::getline(file, line)) {
    std::istringstream sizes(line);
    std::size_t key_bytes = 0, plan_bytes = 0;
    if (!(sizes >> key_bytes >> plan_bytes) || key_bytes > kMostBytes || plan_bytes > kMostBytes)
      damaged(path);
    std::string key(key_bytes, '\0'), plan(plan_bytes, '\0');
    file.read(key.data(), static_cast<std::streamsize>(key_bytes))
        .read(plan.data(), static_cast<std::streamsize>(plan_bytes));
    if (!file || file.get() != '\n') damaged(path);
    plans_[key] = plan;
  }
}

void ConvPlanCache::save(const std::string& path) const {
  const std::string fresh = path + ".new";
  std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
  file << kFileKind << '\n';
  for (const auto& [key, plan] : plans_)
    file << key.size() << ' ' << plan.size() << '\n' << key << plan << '\n';
  file.close();
  if (!file || std::rename(fresh.c_str(), path.c_str()) != 0)
    throw Error(cat("cannot write the file of convolution plans: ", path));
}

}  // namespace onnxddp::cuda

// cuDNN's graph API as far as convolutions need it: descriptors are bags of attributes, and a plan runs plain
// loops with double accumulation. The heuristics propose three engines, so that callers have something to
// choose: a nondeterministic one on tensor cores, one with a large workspace, and a modest one.
#include <cudnn_graph.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "tests/cudaemu/gemm.h"

using namespace cudaemu;

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

namespace {

constexpr int64_t kEngines = 3;
constexpr int64_t kWorkspace[kEngines] = {0, int64_t{1} << 20, 256};
constexpr const char* kPlanKind = "emulated-plan-1";

struct Tensor {
  int64_t id = 0, type = 0;
  int64_t dims[4] = {}, strides[4] = {};
};

/// A convolution of three tensors by one engine.
struct Work {
  int64_t kind = 0, engine = 0;
  Tensor x, w, y;
  int64_t pads[2] = {}, strides[2] = {}, dilations[2] = {};
};

struct Bag;
struct Attribute {
  std::vector<char> bytes;
  std::vector<std::shared_ptr<Bag>> bags;
};
/// The content of a descriptor; descriptors that refer to it share it.
struct Bag {
  cudnnBackendDescriptorType_t type;
  bool final = false;
  std::map<int, Attribute> attributes;
  int64_t engine = 0;
  Work work;
};
struct Descriptor {
  std::shared_ptr<Bag> bag;
};

thread_local std::string last_error;

cudnnStatus_t refuse(cudnnStatus_t status, const std::string& why) {
  last_error = why;
  return status;
}

std::shared_ptr<Bag>& bag(cudnnBackendDescriptor_t d) { return static_cast<Descriptor*>(d)->bag; }

size_t width(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE: return 8;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return sizeof(void*);
    case CUDNN_TYPE_CHAR:
    case CUDNN_TYPE_BOOLEAN: return 1;
    default: return 4;  // float, and the enumerations
  }
}

template <class T>
std::vector<T> values(const Bag& b, int name) {
  const auto found = b.attributes.find(name);
  if (found == b.attributes.end()) return {};
  std::vector<T> out(found->second.bytes.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), found->second.bytes.data(), out.size() * sizeof(T));
  return out;
}
template <class T>
T value(const Bag& b, int name) {
  const std::vector<T> all = values<T>(b, name);
  return all.empty() ? T{} : all.front();
}
std::shared_ptr<Bag> child(const Bag& b, int name) {
  const auto found = b.attributes.find(name);
  return found == b.attributes.end() || found->second.bags.empty() ? nullptr : found->second.bags.front();
}

template <size_t N>
bool copy(const std::vector<int64_t>& from, int64_t (&to)[N]) {
  if (from.size() != N) return false;
  std::copy(from.begin(), from.end(), to);
  return true;
}

bool tensor_of(const std::shared_ptr<Bag>& b, Tensor& t) {
  if (b == nullptr) return false;
  t.id = value<int64_t>(*b, CUDNN_ATTR_TENSOR_UNIQUE_ID);
  t.type = value<int32_t>(*b, CUDNN_ATTR_TENSOR_DATA_TYPE);
  return copy(values<int64_t>(*b, CUDNN_ATTR_TENSOR_DIMENSIONS), t.dims) &&
         copy(values<int64_t>(*b, CUDNN_ATTR_TENSOR_STRIDES), t.strides);
}

/// Attribute names of the operations: x, w, y, convolution.
struct Names {
  int x, w, y, conv;
};
bool names_of(int64_t kind, Names& n) {
  switch (kind) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      n = {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
           CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC};
      return true;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      n = {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
           CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC};
      return true;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      n = {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
           CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
           CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC};
      return true;
    default: return false;
  }
}

/// False unless the sizes fit together.
bool consistent(const Work& v) {
  for (int64_t d : {v.x.dims[1], v.w.dims[1], v.strides[0], v.strides[1], v.dilations[0], v.dilations[1]})
    if (d < 1) return false;
  const int64_t groups = v.x.dims[1] / v.w.dims[1];
  return v.x.dims[1] % v.w.dims[1] == 0 && v.w.dims[0] % groups == 0 && v.y.dims[1] == v.w.dims[0] &&
         v.x.dims[0] == v.y.dims[0] && v.x.type == v.w.type && v.x.type == v.y.type &&
         (v.x.type == CUDNN_DATA_FLOAT || v.x.type == CUDNN_DATA_BFLOAT16);
}

bool operation_of(const Bag& b, Work& v) {
  Names n{};
  v.kind = b.type;
  if (!names_of(b.type, n)) return false;
  const auto conv = child(b, n.conv);
  return conv != nullptr && tensor_of(child(b, n.x), v.x) && tensor_of(child(b, n.w), v.w) &&
         tensor_of(child(b, n.y), v.y) &&
         copy(values<int64_t>(*conv, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS), v.pads) &&
         copy(values<int64_t>(*conv, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES), v.strides) &&
         copy(values<int64_t>(*conv, CUDNN_ATTR_CONVOLUTION_DILATIONS), v.dilations) && consistent(v);
}

// A plan as text: all its numbers.
template <class F>
void each_number(Work& v, const F& f) {
  f(v.kind);
  f(v.engine);
  for (Tensor* t : {&v.x, &v.w, &v.y}) {
    f(t->id);
    f(t->type);
    for (int64_t& d : t->dims) f(d);
    for (int64_t& s : t->strides) f(s);
  }
  for (int i = 0; i < 2; ++i) {
    f(v.pads[i]);
    f(v.strides[i]);
    f(v.dilations[i]);
  }
}
std::string write_plan(Work v) {
  std::string text = kPlanKind;
  each_number(v, [&](int64_t n) { text += " " + std::to_string(n); });
  return text;
}
bool read_plan(const std::string& text, Work& v) {
  std::istringstream in(text);
  std::string kind;
  in >> kind;
  each_number(v, [&](int64_t& n) { in >> n; });
  Names names{};
  return in && kind == kPlanKind && names_of(v.kind, names) && v.engine >= 0 && v.engine < kEngines &&
         consistent(v);
}

cudaDataType element_type(const Tensor& t) { return t.type == CUDNN_DATA_FLOAT ? CUDA_R_32F : CUDA_R_16BF; }

int64_t extent(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < 4; ++i) {
    if (t.dims[i] == 0) return 0;
    last += (t.dims[i] - 1) * t.strides[i];
  }
  return last + 1;
}
int64_t at(const Tensor& t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return a * t.strides[0] + b * t.strides[1] + c * t.strides[2] + d * t.strides[3];
}

/// f(x, w, y offset) for every product of the convolution.
template <class F>
void products(const Work& v, const F& f) {
  const int64_t per = v.w.dims[1], groups = v.x.dims[1] / per, outs = v.w.dims[0] / groups;
  for (int64_t n = 0; n < v.y.dims[0]; ++n)
    for (int64_t k = 0; k < v.y.dims[1]; ++k)
      for (int64_t oy = 0; oy < v.y.dims[2]; ++oy)
        for (int64_t ox = 0; ox < v.y.dims[3]; ++ox)
          for (int64_t r = 0; r < v.w.dims[2]; ++r) {
            const int64_t row = oy * v.strides[0] - v.pads[0] + r * v.dilations[0];
            if (row < 0 || row >= v.x.dims[2]) continue;
            for (int64_t s = 0; s < v.w.dims[3]; ++s) {
              const int64_t col = ox * v.strides[1] - v.pads[1] + s * v.dilations[1];
              if (col < 0 || col >= v.x.dims[3]) continue;
              for (int64_t c = 0; c < per; ++c)
                f(at(v.x, n, k / outs * per + c, row, col), at(v.w, k, c, r, s), at(v.y, n, k, oy, ox));
            }
          }
}

/// Every element of t once.
template <class F>
void each_element(const Tensor& t, const F& f) {
  for (int64_t a = 0; a < t.dims[0]; ++a)
    for (int64_t b = 0; b < t.dims[1]; ++b)
      for (int64_t c = 0; c < t.dims[2]; ++c)
        for (int64_t d = 0; d < t.dims[3]; ++d) f(at(t, a, b, c, d));
}

std::vector<double> load(const Tensor& t, const void* p) {
  std::vector<double> out(static_cast<size_t>(extent(t)), 0.0);
  each_element(t, [&](int64_t i) { out[static_cast<size_t>(i)] = load_element(p, element_type(t), i); });
  return out;
}

void convolve(const Work& v, const void* x, const void* w, const void* y, void* result) {
  const bool forward = v.kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR;
  const bool data = v.kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
  const Tensor& target = forward ? v.y : data ? v.x : v.w;
  const auto xs = forward || !data ? load(v.x, x) : std::vector<double>();
  const auto ws = forward || data ? load(v.w, w) : std::vector<double>();
  const auto ys = forward ? std::vector<double>() : load(v.y, y);
  std::vector<double> sum(static_cast<size_t>(extent(target)), 0.0);
  products(v, [&](int64_t i, int64_t j, int64_t k) {
    const auto xi = static_cast<size_t>(i), wi = static_cast<size_t>(j), yi = static_cast<size_t>(k);
    if (forward)
      sum[yi] += xs[xi] * ws[wi];
    else if (data)
      sum[xi] += ys[yi] * ws[wi];
    else
      sum[wi] += ys[yi] * xs[xi];
  });
  each_element(target, [&](int64_t i) {
    store_element(result, element_type(target), i, sum[static_cast<size_t>(i)]);
  });
}

Access whole(const Tensor& t, const void* p, bool written) {
  return {p, static_cast<size_t>(extent(t)) * element_bytes(element_type(t)), !written, written};
}

cudnnStatus_t finalise_plan(Bag& b) {
  if (const std::vector<char> text = values<char>(b, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION);
      !text.empty()) {
    if (!read_plan(std::string(text.begin(), std::find(text.begin(), text.end(), '\0')), b.work))
      return refuse(CUDNN_STATUS_BAD_PARAM, "not a plan of this library");
    return CUDNN_STATUS_SUCCESS;
  }
  const auto config = child(b, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  if (config == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM, "a plan without an engine");
  b.work = config->work;
  b.work.engine = config->engine;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t finalise_graph(Bag& b) {
  const auto operation = child(b, CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (operation == nullptr || !operation_of(*operation, b.work))
    return refuse(CUDNN_STATUS_BAD_PARAM, "the sizes of a convolution do not fit together");
  return CUDNN_STATUS_SUCCESS;
}

/// What heuristics, configurations, engines, plans and device properties say of themselves.
struct Answer {
  std::vector<char> bytes;
  std::vector<std::shared_ptr<Bag>> bags;
};
template <class T>
void add(Answer& answer, const T& v) {
  const char* from = reinterpret_cast<const char*>(&v);
  answer.bytes.insert(answer.bytes.end(), from, from + sizeof v);
}
std::shared_ptr<Bag> derived(cudnnBackendDescriptorType_t type, const Work& work, int64_t engine) {
  auto out = std::make_shared<Bag>();
  out->type = type;
  out->final = true;
  out->work = work;
  out->engine = engine;
  return out;
}

Answer answer(const Bag& b, int name) {
  Answer out;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      for (int64_t e = 0; e < kEngines; ++e)
        out.bags.push_back(derived(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
                                   child(b, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->work, e));
      break;
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      out.bags.push_back(derived(CUDNN_BACKEND_ENGINE_DESCRIPTOR, b.work, b.engine));
      break;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      if (b.engine == 0) {
        add(out, CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
        add(out, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
      }
      break;
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE: break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: add(out, kWorkspace[b.work.engine]); break;
    case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION:
      for (const char c : write_plan(b.work)) out.bytes.push_back(c);
      out.bytes.push_back('\0');
      break;
    case CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION:
      out.bytes = values<char>(b, name);
      if (out.bytes.empty())
        for (const char c : std::string("{\"deviceName\": \"emulated device\"}")) out.bytes.push_back(c);
      break;
    default: not_emulated("cuDNN attribute " + std::to_string(name));
  }
  return out;
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "success" : "refused by the emulated cuDNN";
}
void cudnnGetLastErrorString(char* message, size_t size) {
  if (size == 0) return;
  std::strncpy(message, last_error.c_str(), size - 1);
  message[size - 1] = '\0';
  last_error.clear();
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  Lock lock;
  if (unsafe_call() != cudaSuccess)
    return refuse(CUDNN_STATUS_INTERNAL_ERROR, "cudnnCreate during a capture");
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  Lock lock;
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  Lock lock;
  if (handle == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM, "no handle");
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  auto fresh = std::make_shared<Bag>();
  fresh->type = type;
  *descriptor = new Descriptor{fresh};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete static_cast<Descriptor*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void* elements) {
  Bag& b = *bag(descriptor);
  if (b.final) return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor is finalized");
  Attribute& a = b.attributes[name];
  a = {};
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (int64_t i = 0; i < count; ++i) {
      a.bags.push_back(bag(static_cast<const cudnnBackendDescriptor_t*>(elements)[i]));
      if (!a.bags.back()->final)
        return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor referred to is not finalized");
    }
    return CUDNN_STATUS_SUCCESS;
  }
  const auto* from = static_cast<const char*>(elements);
  a.bytes.assign(from, from + static_cast<size_t>(count) * width(type));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  Bag& b = *bag(descriptor);
  cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
  if (b.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) status = finalise_plan(b);
  if (b.type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) status = finalise_graph(b);
  if (b.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR &&
      child(b, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) == nullptr)
    status = refuse(CUDNN_STATUS_BAD_PARAM, "heuristics without a graph");
  b.final = status == CUDNN_STATUS_SUCCESS;
  return status;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       int64_t requested, int64_t* count, void* elements) {
  const Bag& b = *bag(descriptor);
  if (!b.final) return refuse(CUDNN_STATUS_BAD_PARAM, "the descriptor is not finalized");
  const Answer a = answer(b, name);
  const auto there = static_cast<int64_t>(
      type == CUDNN_TYPE_BACKEND_DESCRIPTOR ? a.bags.size() : a.bytes.size() / width(type));
  if (count != nullptr) *count = elements == nullptr ? there : std::min(there, requested);
  if (elements == nullptr) return CUDNN_STATUS_SUCCESS;
  const int64_t given = std::min(there, requested);
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (int64_t i = 0; i < given; ++i)
      bag(static_cast<cudnnBackendDescriptor_t*>(elements)[i]) = a.bags[static_cast<size_t>(i)];
  } else if (given > 0) {
    std::memcpy(elements, a.bytes.data(), static_cast<size_t>(given) * width(type));
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
  Lock lock;
  const Work v = bag(plan)->work;
  const auto ids = values<int64_t>(*bag(pack), CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = values<void*>(*bag(pack), CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  const auto operand = [&](const Tensor& t) -> void* {
    const auto found = std::find(ids.begin(), ids.end(), t.id);
    return found == ids.end() ? nullptr : pointers[static_cast<size_t>(found - ids.begin())];
  };
  void *x = operand(v.x), *w = operand(v.w), *y = operand(v.y);
  void* workspace = value<void*>(*bag(pack), CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  for (void* p : {x, w, y})
    if (p == nullptr || reinterpret_cast<uintptr_t>(p) % 16 != 0)
      return refuse(CUDNN_STATUS_BAD_PARAM, "an operand is missing or not aligned to 16 bytes");
  const bool forward = v.kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR;
  const bool data = v.kind == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR;
  Op op;
  op.name = forward ? "convolution" : data ? "convolution's data gradient" : "convolution's weight gradient";
  op.touched = {whole(v.x, x, data), whole(v.w, w, !forward && !data), whole(v.y, y, forward)};
  if (const auto bytes = static_cast<size_t>(kWorkspace[v.engine]); bytes > 0) {
    if (workspace == nullptr) return refuse(CUDNN_STATUS_BAD_PARAM, "no workspace");
    op.touched.push_back({workspace, bytes, false, true});
  }
  op.run = [v, x, w, y, result = forward ? y : data ? x : w] { convolve(v, x, w, y, result); };
  return enqueue(handle->stream, std::move(op)) == cudaSuccess
             ? CUDNN_STATUS_SUCCESS
             : refuse(CUDNN_STATUS_EXECUTION_FAILED, "the stream refuses work");
}

}  // extern "C"

// Device queries, errors, launch limits, copies and fills.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "tests/cudaemu/core.h"

namespace cudaemu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = -1;
int process_device = -1;

constexpr size_t kOptInShared = 227 << 10, kDefaultShared = 48 << 10;

std::map<const void*, size_t>& allowed_shared() {
  static auto* m = new std::map<const void*, size_t>;
  return *m;
}

const std::map<cudaError_t, std::pair<const char*, const char*>>& error_texts() {
  static const auto* m = new std::map<cudaError_t, std::pair<const char*, const char*>>{
      {cudaSuccess, {"cudaSuccess", "no error"}},
      {cudaErrorInvalidValue, {"cudaErrorInvalidValue", "invalid argument"}},
      {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
      {cudaErrorInvalidConfiguration, {"cudaErrorInvalidConfiguration", "invalid configuration argument"}},
      {cudaErrorInvalidMemcpyDirection,
       {"cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"}},
      {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {cudaErrorNoDevice, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
      {cudaErrorInvalidResourceHandle, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {cudaErrorIllegalState,
       {"cudaErrorIllegalState", "the operation cannot be performed in the present state"}},
      {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
      {cudaErrorNotPermitted, {"cudaErrorNotPermitted", "operation not permitted"}},
      {cudaErrorHostMemoryAlreadyRegistered,
       {"cudaErrorHostMemoryAlreadyRegistered", "the memory is already mapped by the device"}},
      {cudaErrorHostMemoryNotRegistered,
       {"cudaErrorHostMemoryNotRegistered", "the memory is not registered"}},
      {cudaErrorStreamCaptureUnsupported,
       {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
      {cudaErrorStreamCaptureInvalidated,
       {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
      {cudaErrorStreamCaptureMerge, {"cudaErrorStreamCaptureMerge", "operation would merge two captures"}},
      {cudaErrorStreamCaptureUnmatched,
       {"cudaErrorStreamCaptureUnmatched", "capture was not begun on this stream"}},
      {cudaErrorStreamCaptureUnjoined,
       {"cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"}},
      {cudaErrorStreamCaptureIsolation,
       {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
      {cudaErrorStreamCaptureWrongThread,
       {"cudaErrorStreamCaptureWrongThread", "attempt to end a capture from another thread"}},
      {cudaErrorCapturedEvent,
       {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capture"}},
  };
  return *m;
}

bool device_side(const void* p) { return is_device(p); }

// The direction that the addresses say, or an error when `kind` says another.
cudaError_t direction(const void* to, const void* from, cudaMemcpyKind kind, cudaMemcpyKind* actual) {
  *actual = device_side(to) ? (device_side(from) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                            : (device_side(from) ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
  if (kind != cudaMemcpyDefault && kind != *actual) {
    report("a copy whose direction contradicts its addresses");
    return cudaErrorInvalidMemcpyDirection;
  }
  if (*actual == cudaMemcpyHostToHost) not_emulated("copies from host to host");
  return cudaSuccess;
}

struct Copy {
  char* to;
  const char* from;
  size_t to_pitch, from_pitch, width, height;
  cudaMemcpyKind kind;
};

size_t extent(size_t pitch, size_t width, size_t height) {
  return height == 0 ? 0 : (height - 1) * pitch + width;
}

void run_copy(const Copy& c, const std::string& name) {
  for (size_t row = 0; row < c.height; ++row) {
    const char* from = c.from + row * c.from_pitch;
    std::memcpy(c.to + row * c.to_pitch, from, c.width);
    if (c.kind != cudaMemcpyDeviceToHost) continue;
    const size_t at = find_poison(from, c.width);
    if (at != std::string::npos)
      report(name + ": uninitialised value reaches the host, from byte " + std::to_string(at) + " of " +
             describe_address(from));
  }
}

bool is_pinned(const void* p) { return find_pinned(p) != nullptr; }

std::vector<Access> rows(const void* p, size_t pitch, size_t width, size_t height, bool write) {
  const auto* c = static_cast<const char*>(p);
  if (pitch == width) return {{c, width * height, !write, write}};
  std::vector<Access> out;
  for (size_t row = 0; row < height; ++row) out.push_back({c + row * pitch, width, !write, write});
  return out;
}

Op copy_op(const Copy& c) {
  Op op;
  op.name = c.kind == cudaMemcpyHostToDevice   ? "copy to device"
            : c.kind == cudaMemcpyDeviceToHost ? "copy to host"
                                               : "copy on device";
  if (device_side(c.to)) op.touched = rows(c.to, c.to_pitch, c.width, c.height, true);
  if (device_side(c.from)) {
    const auto reads = rows(c.from, c.from_pitch, c.width, c.height, false);
    op.touched.insert(op.touched.end(), reads.begin(), reads.end());
  }
  op.run = [c, name = op.name] { run_copy(c, name); };
  return op;
}

// Pageable memory is read at once (as into a staging buffer), or waited for when it is written.
cudaError_t copy(const Copy& c, cudaStream_t stream) {
  if (c.width == 0 || c.height == 0) return cudaSuccess;
  if (c.width > c.to_pitch || c.width > c.from_pitch) return fail(cudaErrorInvalidValue);
  if (cudaError_t e = check_stream(stream, "copy")) return e;
  Op op = copy_op(c);
  const void* host = c.kind == cudaMemcpyHostToDevice   ? c.from
                     : c.kind == cudaMemcpyDeviceToHost ? c.to
                                                        : nullptr;
  if (host == nullptr || is_pinned(host)) {
    if (host != nullptr) op.pins.push_back({host, c.kind == cudaMemcpyDeviceToHost});
    return enqueue(stream, std::move(op));
  }
  if (stream->capture != nullptr) not_emulated("the capture of a copy with pageable host memory");
  if (c.kind == cudaMemcpyHostToDevice) {
    const auto staged = std::make_shared<std::vector<char>>(extent(c.from_pitch, c.width, c.height));
    std::memcpy(staged->data(), c.from, staged->size());
    Copy from_staging = c;
    from_staging.from = staged->data();
    op.run = [from_staging, staged, name = op.name] { run_copy(from_staging, name); };
    return enqueue(stream, std::move(op));
  }
  if (cudaError_t e = enqueue(stream, std::move(op))) return e;
  return cudaStreamSynchronize(stream);
}

cudaError_t fill(void* p, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!device_side(p)) not_emulated("memset of host memory");
  Op op;
  op.name = "memset";
  op.touched = {{p, bytes, false, true}};
  op.run = [=] { std::memset(p, value, bytes); };
  return enqueue(stream, std::move(op));
}

cudaError_t copy_any(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                     cudaMemcpyKind* actual) {
  if (bytes == 0) return cudaSuccess;
  if (cudaError_t e = direction(to, from, kind, actual)) return fail(e);
  return copy({static_cast<char*>(to), static_cast<const char*>(from), bytes, bytes, bytes, 1, *actual},
              stream);
}

}  // namespace

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

static bool launch_allowed(const void* function, dim3 grid, dim3 block, size_t shared_bytes) {
  const auto allowed = allowed_shared().find(function);
  const size_t limit = allowed == allowed_shared().end() ? kDefaultShared : allowed->second;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool good = threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                    grid.z >= 1 && grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535 &&
                    shared_bytes <= limit;
  if (!good) fail(shared_bytes > limit ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration);
  return good;
}

void launch_kernel(const char* name, const void* function, dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, std::vector<Access> touched, const std::vector<const void*>& pointers,
                   std::function<void()> body) {
  Lock lock;
  if (!launch_allowed(function, grid, block, shared_bytes)) return;
  for (const void* p : pointers) {
    if (p == nullptr) continue;
    const bool declared = std::any_of(touched.begin(), touched.end(), [p](const Access& a) {
      const auto *from = static_cast<const char*>(a.data), *c = static_cast<const char*>(p);
      return c >= from && c <= from + a.bytes;
    });
    if (!is_device(p) && !is_mapped(p))
      report(std::string("kernel ") + name + ": host pointer as an argument");
    else if (!declared)
      report(std::string("kernel ") + name + ": no declared range holds the argument that points to " +
             describe_address(p));
  }
  Op op;
  op.name = std::string("kernel ") + name;
  op.touched = std::move(touched);
  op.run = [text = op.name, grid, block, shared_bytes, body = std::move(body)] {
    run_grid(text, grid, block, shared_bytes, body);
  };
  enqueue(stream, std::move(op));
}

}  // namespace cudaemu

using namespace cudaemu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  Lock lock;
  *count = config().devices;
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  Lock lock;
  if (device < 0 || device >= config().devices) return fail(cudaErrorInvalidDevice);
  if (process_device >= 0 && process_device != device) not_emulated("two devices in one process");
  process_device = current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  Lock lock;
  *device = current_device < 0 ? 0 : current_device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  Lock lock;
  if (device < 0 || device >= config().devices) return fail(cudaErrorInvalidDevice);
  *p = {};
  std::snprintf(p->name, sizeof p->name, "emulated device");
  p->major = 9;
  p->minor = 0;
  p->totalGlobalMem = config().memory;
  p->multiProcessorCount = 4;
  p->warpSize = kWarpSize;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = kDefaultShared;
  p->sharedMemPerBlockOptin = kOptInShared;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  const int threads[3] = {1024, 1024, 64}, grid[3] = {0x7fffffff, 65535, 65535};
  std::copy(threads, threads + 3, p->maxThreadsDim);
  std::copy(grid, grid + 3, p->maxGridSize);
  p->asyncEngineCount = 3;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaError_t e = cudaGetDeviceProperties(&p, device)) return e;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    default: not_emulated("device attribute " + std::to_string(attribute));
  }
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  const auto it = error_texts().find(error);
  return it == error_texts().end() ? "cudaErrorUnknown" : it->second.first;
}
const char* cudaGetErrorString(cudaError_t error) {
  const auto it = error_texts().find(error);
  return it == error_texts().end() ? "unknown error" : it->second.second;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Lock lock;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    not_emulated("function attribute " + std::to_string(attribute));
  if (value < 0 || static_cast<size_t>(value) > kOptInShared) return fail(cudaErrorInvalidValue);
  allowed_shared()[function] = std::max(kDefaultShared, static_cast<size_t>(value));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  Lock lock;
  cudaMemcpyKind actual = kind;
  return copy_any(to, from, bytes, kind, stream, &actual);
}

// On the default stream, which no other stream waits for here. To the device from pageable memory, and within
// the device, it may return before the copy is done, as documented.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  Lock lock;
  cudaMemcpyKind actual = kind;
  if (cudaError_t e = unsafe_call()) return fail(e);
  if (cudaError_t e = copy_any(to, from, bytes, kind, default_stream(), &actual)) return e;
  if (actual == cudaMemcpyDeviceToDevice || (actual == cudaMemcpyHostToDevice && !is_pinned(from)))
    return cudaSuccess;
  return cudaStreamSynchronize(default_stream());
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  Lock lock;
  if (width == 0 || height == 0) return cudaSuccess;
  cudaMemcpyKind actual;
  if (cudaError_t e = direction(to, from, kind, &actual)) return fail(e);
  return copy(
      {static_cast<char*>(to), static_cast<const char*>(from), to_pitch, from_pitch, width, height, actual},
      stream);
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  Lock lock;
  return fill(p, value, bytes, stream);
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  Lock lock;
  if (cudaError_t e = unsafe_call()) return fail(e);
  return fill(p, value, bytes, default_stream());
}

}  // extern "C"

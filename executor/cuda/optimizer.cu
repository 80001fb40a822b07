// SGD, Adam and AdamW over a list of parameters in one launch. Learning rate and step are device numbers, so
// that a captured graph needs no update.
#include "executor/cuda/lists.h"
#include "executor/scalar_ops.h"

namespace onnxddp::cuda {
namespace {

constexpr int kState = 4;  // elements that a thread takes at a time where all is float and aligned

__device__ inline bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
__device__ inline bool entry_aligned(const UpdateEntry& e) {
  return aligned16(e.p) && aligned16(e.g) && aligned16(e.p_next) && aligned16(e.m) && aligned16(e.v) &&
         aligned16(e.vmax) && aligned16(e.m_next) && aligned16(e.v_next) && aligned16(e.vmax_next);
}
__device__ inline Vec<float> load_state(const float* p, std::int64_t i) {
  return p == nullptr ? Vec<float>{} : load_vec(p + i);
}
__device__ inline void store_state(float* p, std::int64_t i, const Vec<float>& v) {
  if (p != nullptr) store_vec(p + i, v);
}

/// One element: f(p, g, m, v, vmax) returns p.next and replaces the state.
template <class P, class G, class F>
__device__ inline void update_one(const UpdateEntry& e, std::int64_t i, float grad_scale, const F& f) {
  float m = e.m == nullptr ? 0.0f : e.m[i], v = e.v == nullptr ? 0.0f : e.v[i],
        vmax = e.vmax == nullptr ? 0.0f : e.vmax[i];
  const float p = load(static_cast<const P*>(e.p)[i]), g = load(static_cast<const G*>(e.g)[i]) * grad_scale;
  static_cast<P*>(e.p_next)[i] = store<P>(f(p, g, m, v, vmax));
  if (e.m_next != nullptr) e.m_next[i] = m;
  if (e.v_next != nullptr) e.v_next[i] = v;
  if (e.vmax_next != nullptr) e.vmax_next[i] = vmax;
}

template <class P, class G, class F>
__device__ inline void update_chunk(const ChunkView<UpdateEntry>& chunk, const float* scale, const F& f) {
  const UpdateEntry& e = chunk.entry;
  const float grad_scale = scale == nullptr ? 1.0f : *scale;
  std::int64_t begin = chunk.begin;
  if constexpr (std::is_same_v<P, float> && std::is_same_v<G, float>) {
    if (entry_aligned(e)) {
      const std::int64_t vectors = (chunk.end - begin) / kState;
      for (std::int64_t w = threadIdx.x; w < vectors; w += blockDim.x) {
        const std::int64_t i = begin + w * kState;
        Vec<float> p = load_vec(static_cast<const float*>(e.p) + i),
                   g = load_vec(static_cast<const float*>(e.g) + i);
        Vec<float> m = load_state(e.m, i), v = load_state(e.v, i), vmax = load_state(e.vmax, i);
        ONNXDDP_UNROLL
        for (int j = 0; j < kState; ++j) p.v[j] = f(p.v[j], g.v[j] * grad_scale, m.v[j], v.v[j], vmax.v[j]);
        store_vec(static_cast<float*>(e.p_next) + i, p);
        store_state(e.m_next, i, m);
        store_state(e.v_next, i, v);
        store_state(e.vmax_next, i, vmax);
      }
      begin += vectors * kState;
    }
  }
  for (std::int64_t i = begin + threadIdx.x; i < chunk.end; i += blockDim.x)
    update_one<P, G>(e, i, grad_scale, f);
}

template <class P, class G>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(ListView<UpdateEntry> list, bool nesterov, const float* scale) {
  const ChunkView<UpdateEntry> chunk(list);
  const auto step = scalar::Sgd<float>::from(chunk.entry.hyper, nesterov);
  const bool momentum = chunk.entry.m != nullptr;
  update_chunk<P, G>(chunk, scale, [&](float p, float g, float& m, float&, float&) {
    return momentum ? step(p, g, m) : step(p, g);
  });
}

template <class P, class G>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(ListView<UpdateEntry> list, bool decoupled, const float* scale) {
  const ChunkView<UpdateEntry> chunk(list);
  ONNXDDP_SHARED(float, numbers, [8]);  // the bias corrections need pow in double: once a block
  if (threadIdx.x == 0) {
    const auto a = scalar::Adam<float>::from(chunk.entry.hyper, decoupled);
    numbers[0] = a.rate;
    numbers[1] = a.grow1;
    numbers[2] = a.beta2;
    numbers[3] = a.grow2;
    numbers[4] = a.root_correction2;
    numbers[5] = a.eps;
    numbers[6] = a.weight_decay;
    numbers[7] = a.shrink;
  }
  __syncthreads();
  const scalar::Adam<float> step{numbers[0], numbers[1], numbers[2], numbers[3],
                                 numbers[4], numbers[5], numbers[6], numbers[7]};
  const bool amsgrad = chunk.entry.vmax != nullptr;
  update_chunk<P, G>(chunk, scale, [&](float p, float g, float& m, float& v, float& vmax) {
    step.moments(p, g, m, v);
    if (amsgrad) vmax = vmax > v ? vmax : v;
    return step.step(p, m, amsgrad ? vmax : v);
  });
}

std::vector<Range> update_ranges(const UpdateList& list, std::int64_t p_width, std::int64_t g_width,
                                 std::int64_t columns, const float* scale) {
  std::vector<Range> ranges = table_ranges(list);
  ranges.push_back(maybe_reads(scale, 1));
  for (const UpdateEntry& e : list.tensors) {
    ranges.push_back(reads(static_cast<const char*>(e.p), e.n * p_width));
    ranges.push_back(reads(static_cast<const char*>(e.g), e.n * g_width));
    ranges.push_back(writes(static_cast<char*>(e.p_next), e.n * p_width));
    for (const float* state : {e.m, e.v, e.vmax}) ranges.push_back(maybe_reads(state, e.n));
    for (float* state : {e.m_next, e.v_next, e.vmax_next}) ranges.push_back(maybe_writes(state, e.n));
    ranges.push_back(reads(e.hyper, columns));
  }
  return ranges;
}

/// Calls f(P(), G()) for the pairs of dtypes that updates know.
template <class F>
void with_pair(const char* kernel, DType p, DType g, const F& f) {
  with_float(kernel, p,
             [&](auto parameter) { with_float(kernel, g, [&](auto gradient) { f(parameter, gradient); }); });
}

}  // namespace

void sgd(const UpdateList& list, DType p, DType g, bool nesterov, const float* grad_scale,
         cudaStream_t stream) {
  with_pair("sgd", p, g, [&](auto parameter, auto gradient) {
    using P = decltype(parameter);
    using G = decltype(gradient);
    launch("sgd", sgd_kernel<P, G>, list_grid(list), dim3(kThreads), 0, stream,
           update_ranges(list, sizeof(P), sizeof(G), 5, grad_scale), view_of(list), nesterov, grad_scale);
  });
}

void adam(const UpdateList& list, DType p, DType g, bool decoupled, const float* grad_scale,
          cudaStream_t stream) {
  with_pair("adam", p, g, [&](auto parameter, auto gradient) {
    using P = decltype(parameter);
    using G = decltype(gradient);
    launch("adam", adam_kernel<P, G>, list_grid(list), dim3(kThreads), 0, stream,
           update_ranges(list, sizeof(P), sizeof(G), 6, grad_scale), view_of(list), decoupled, grad_scale);
  });
}

}  // namespace onnxddp::cuda

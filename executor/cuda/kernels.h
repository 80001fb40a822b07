// The CUDA kernels: plain pointers to device memory, shapes, a stream. Every function queues work and
// returns; none allocates or waits. Sizes count elements; empty tensors are allowed everywhere; pointers need
// the alignment of their element only (128-bit accesses are used where they can be). Storage is f32 or bf16
// unless said otherwise, sums are formed in float (or double) in an order that depends on shapes only: the
// same bits in every run. Host-side plans (walks, parts of reductions) are made once at prepare. "scratch" is
// device memory of the size that the function before it states, 16-byte aligned. A kernel that may write on
// top of an operand says so. Throws InternalError for a dtype that a kernel lacks, or when CUDA refuses a
// launch.
#pragma once
#include <cuda_runtime_api.h>

#include <string_view>
#include <vector>

#include "executor/cuda/walk.h"

namespace onnxddp::cuda {

// --- elementwise (elementwise.cu) ---

/// y[i] = f(x[i]) over n elements in memory order. min, max: of Clip and ClipMask. y may be x.
using UnaryKernel = void (*)(const void* x, void* y, std::int64_t n, double min, double max, cudaStream_t);
/// The kernel of an op (Neg, Exp, Clip, Not, …), or null if the dtype has none. Floats: all; i64, i32: the
/// ops of ONNXDDP_UNARY_OPS; bool: Not.
UnaryKernel unary_kernel(std::string_view op, DType dtype);

/// y = f(a, b) through the strides of walk (operands y, a, b). y may be an operand of the same strides and
/// dtype.
using BinaryKernel = void (*)(const Walk<3>& walk, const void* a, const void* b, void* y, cudaStream_t);
/// Add, Sub, Mul, Div, Max, Min: f32, bf16, i64, i32; Pow: floats; Equal, Less, Greater (y: bool): those and
/// bool; And, Or: bool. dtype: of a and b.
BinaryKernel binary_kernel(std::string_view op, DType dtype);

/// y = condition ? a : b; operands y, condition, a, b. width: bytes of an element (1, 2, 4, 8).
void where(const Walk<4>& walk, const bool* condition, const void* a, const void* b, void* y,
           std::size_t width, cudaStream_t);

/// Between f32, bf16, f64, i64, i32, i16, i8, u8, bool. Float to integer truncates and saturates, NaN becomes
/// 0; to bool: != 0.
void cast(const void* x, DType from, void* y, DType to, std::int64_t n, cudaStream_t);

// --- reductions (reduce.cu) ---

enum class Reduction { sum, mean, max };

/// How a reduction is spread over blocks. Made by plan_reduce.
struct ReducePlan {
  Walk<2> kept;       // y, x
  Walk<1> reduced;    // x
  int lanes = 1;      // outputs that a block makes
  int rows = 1;       // threads that share an output; lanes * rows = 256
  int parts = 1;      // blocks that share an output
  bool along = true;  // neighbouring threads read along the reduced axes
};
/// shape, x_strides: of the input. y_strides: one an axis of the input, ignored where `gone`.
ReducePlan plan_reduce(const Ints& shape, const Ints& x_strides, const std::vector<bool>& gone,
                       const Ints& y_strides);
/// SumTo: sums the axes that broadcasting y_shape to x_shape adds or stretches.
ReducePlan plan_sum_to(const Ints& x_shape, const Ints& x_strides, const Ints& y_shape,
                       const Ints& y_strides);
std::size_t reduce_scratch_bytes(const ReducePlan& plan);
/// f32, bf16 and (sum, max) i64, i32. NaN wins a maximum; the mean of nothing is NaN, the maximum of nothing
/// -inf (or the least integer).
void reduce(Reduction kind, const ReducePlan& plan, DType dtype, const void* x, void* y, void* scratch,
            cudaStream_t);

/// y[o, i] = first k with the greatest x[o, k, i]; x: [outer, n, inner], n > 0. f32, bf16, i64, i32.
void arg_max(DType dtype, const void* x, std::int64_t* y, std::int64_t outer, std::int64_t n,
             std::int64_t inner, cudaStream_t);

/// Number of labels that are not `ignore`, as one f32, bf16, f64, i64 or i32. wide: the labels are i64, else
/// i32.
void count_targets(const void* labels, bool wide, std::int64_t n, std::int64_t ignore, DType to, void* y,
                   cudaStream_t);

// --- softmax and losses (softmax.cu) ---

/// A tensor as rows along one axis: row r begins at r / inner * n * inner + r % inner, its elements are
/// `inner` apart.
struct Rows {
  std::int64_t count = 0, n = 0, inner = 1;
};
/// y may be x.
void softmax(DType dtype, const Rows& rows, const void* x, void* y, cudaStream_t);
void log_softmax(DType dtype, const Rows& rows, const void* x, void* y, cudaStream_t);
/// dx from the forward result y: y * (dy - sum(dy * y)), and dy - exp(y) * sum(dy). dx may be dy.
void softmax_grad(DType dtype, const Rows& rows, const void* dy, const void* y, void* dx, cudaStream_t);
void log_softmax_grad(DType dtype, const Rows& rows, const void* dy, const void* y, void* dx, cudaStream_t);

/// A device word for the first index or label that is out of range: all ones means none, else row << 32 | the
/// value as an i32 (saturated). The kernels keep the least; the caller sets it to all ones.
using FaultWord = unsigned long long;

/// One label a row. A label that is out of range and not `ignore` goes to `fault` and counts as ignored.
struct Labels {
  const void* data = nullptr;
  bool wide = true;  // i64, else i32
  std::int64_t ignore = INT64_MIN;
  FaultWord* fault = nullptr;
};
std::size_t loss_scratch_bytes(const Rows& rows);
/// *loss = sum over rows of -log softmax(x)[label]; the sum over rows is in double. logits = false: x holds
/// logarithms already (NllLoss).
void classification_loss(DType dtype, const Rows& rows, bool logits, const void* x, const Labels& labels,
                         void* loss, void* scratch, cudaStream_t);
/// dx = *dy * (softmax(x) - onehot(label)), or *dy * -onehot(label) for logits = false (x is not read); 0 in
/// ignored rows.
void classification_loss_grad(DType dtype, const Rows& rows, bool logits, const void* x, const Labels& labels,
                              const void* dy, void* dx, cudaStream_t);

// --- batch norm (norm.cu): x and y in their dtype, statistics and parameters in float ---

using onnxddp::Channels;
/// Scratch of every function of this section.
std::size_t norm_scratch_bytes(const Channels& v);
/// stats[2C+2] = mean[C], M2[C], count as hi * 2^20 + lo (BatchStats).
void batch_stats(DType dtype, const Channels& v, const void* x, float* stats, void* scratch, cudaStream_t);
/// Statistics of count 1 from running ones (FixedStats).
void fixed_stats(const float* mean, const float* var, float* stats, std::int64_t c, cudaStream_t);
/// Chan's merge of `ranks` packed statistics in rank order (MergeStats).
void merge_stats(const float* gathered, float* stats, std::int64_t ranks, std::int64_t c, cudaStream_t);
/// y = (x - mean) * scale / sqrt(M2/count + epsilon) + bias, then + add (if given), then max(0, .) for relu.
/// y may be x or add.
void batch_norm_apply(DType dtype, const Channels& v, const void* x, const float* scale, const float* bias,
                      const float* stats, double epsilon, const void* add, bool relu, void* y, void* scratch,
                      cudaStream_t);
/// next = r * momentum + s * (1 - momentum); outputs may be null, or on top of their inputs.
void running_stats(const float* mean, const float* var, const float* stats, double momentum, bool unbiased,
                   float* next_mean, float* next_var, std::int64_t c, cudaStream_t);
/// dbias = sum dy, dscale = sum dy * xhat; each may be null.
void batch_norm_grad_sums(DType dtype, const Channels& v, const void* dy, const void* x, const float* stats,
                          double epsilon, float* dbias, float* dscale, void* scratch, cudaStream_t);
/// dx = scale * r * (dy - dbias/m - xhat * dscale/m), r = 1/sqrt(M2/count + epsilon); scale * r * dy with
/// null sums. dx may be dy or x.
void batch_norm_grad_apply(DType dtype, const Channels& v, const void* dy, const void* x, const float* scale,
                           const float* stats, double epsilon, const float* dbias, const float* dscale,
                           void* dx, void* scratch, cudaStream_t);

// --- layer norm (layer_norm.cu): rows of n elements; scale, bias and statistics in float ---

/// y = (x - mean) * rstd * scale + bias; mean and rstd [rows] are written for the gradient. bias may be null;
/// y may be x.
void layer_norm(DType dtype, const void* x, const float* scale, const float* bias, double epsilon, void* y,
                float* mean, float* rstd, std::int64_t rows, std::int64_t n, cudaStream_t);
std::size_t layer_norm_grad_scratch_bytes(std::int64_t rows, std::int64_t n);
/// dbias may be null; dx may be dy or x.
void layer_norm_grad(DType dtype, const void* dy, const void* x, const float* scale, const float* mean,
                     const float* rstd, void* dx, float* dscale, float* dbias, std::int64_t rows,
                     std::int64_t n, void* scratch, cudaStream_t);

// --- pooling (pool.cu): image and pooled tensor both dense (NCHW) or both NHWC. A kernel as large as the
// image is global
//     pooling ---

struct Pool {
  std::int64_t n = 0, c = 0, h = 0, w = 0, oh = 0, ow = 0;
  int kh = 1, kw = 1, sh = 1, sw = 1, dh = 1, dw = 1;
  int ph = 0, pw = 0, ph_end = 0, pw_end = 0;
  bool nhwc = false;
  bool count_pads = false;  // average: count_include_pad
};
void max_pool(DType dtype, const Pool& pool, const void* x, void* y, cudaStream_t);
/// Gathers: the gradient of a window goes to its first maximum.
void max_pool_grad(DType dtype, const Pool& pool, const void* dy, const void* x, void* dx, cudaStream_t);
void average_pool(DType dtype, const Pool& pool, const void* x, void* y, cudaStream_t);
void average_pool_grad(DType dtype, const Pool& pool, const void* dy, void* dx, cudaStream_t);

// --- layout (layout.cu): elements of any dtype by their width ---

/// One strided copy; offsets and strides in elements. Made by plan_copy or one of the functions after it.
struct CopyPlan {
  Walk<2> walk;  // y, x
  std::int64_t y_offset = 0, x_offset = 0;
  std::size_t width = 4;  // bytes of an element
};
CopyPlan plan_copy(const Ints& size, const Ints& y_strides, const Ints& x_strides, std::size_t width,
                   std::int64_t y_offset = 0, std::int64_t x_offset = 0);
/// y axis d is x axis perm[d]; x and y dense.
CopyPlan plan_transpose(const Ints& x_shape, const Ints& perm, std::size_t width);
CopyPlan plan_expand(const Ints& x_shape, const Ints& y_shape, std::size_t width);
/// Element starts[d] + i * steps[d] of every axis; negative steps allowed.
CopyPlan plan_slice(const Ints& x_shape, const Ints& starts, const Ints& steps, const Ints& y_shape,
                    std::size_t width);
/// x into y from index `start` of `axis` on: one piece of Concat, or with starts in all axes the middle of
/// Pad.
CopyPlan plan_place(const Ints& x_shape, const Ints& y_shape, const Ints& starts, std::size_t width);
/// x and y must not overlap.
void copy(const CopyPlan& plan, const void* x, void* y, cudaStream_t);
/// y[0..n) = the element of `width` bytes in the low bytes of `bits`.
void fill(void* y, std::int64_t n, std::uint64_t bits, std::size_t width, cudaStream_t);
/// y (of y_shape, dense) = `bits` everywhere, then x placed at starts.
void pad(const void* x, const Ints& x_shape, void* y, const Ints& y_shape, const Ints& starts,
         std::uint64_t bits, std::size_t width, cudaStream_t);
/// y += x through the plan: SumPieces is a fill by 0 and one call a piece. f32, bf16, i64, i32.
void add_to(const CopyPlan& plan, DType dtype, const void* x, void* y, cudaStream_t);

// --- indexing (index.cu): indices i64 (wide) or i32, negative ones count from the end ---

/// The indexed tensor is [outer, size, inner], the other one [outer, count, inner].
struct Table {
  std::int64_t outer = 1, size = 1, inner = 1, count = 0;
};
/// y[o, i] = x[o, indices[i]]; rows of indices that are out of range become 0 and go to `fault`.
void gather(const Table& table, std::size_t width, const void* x, const void* indices, bool wide, void* y,
            FaultWord* fault, cudaStream_t);
std::size_t gather_grad_scratch_bytes(const Table& table);
/// dx = 0, dx[o, indices[i]] += dy[o, i] in the order of i (float accumulation). Indices out of range are
/// left out and go to `fault`. At most 2^31 - 1 indices.
void gather_grad(const Table& table, DType dtype, const void* dy, const void* indices, bool wide, void* dx,
                 void* scratch, FaultWord* fault, cudaStream_t);

// --- dropout (dropout.cu) ---

/// y = x * mask / (1 - ratio) with the masks of philox.h. state: device i64[5]; inner: elements of a row, 0
/// where the tensor is not batch-major; mask may be null; y may be x.
void dropout(DType dtype, const void* x, const std::int64_t* state, std::int64_t key, double ratio,
             std::int64_t inner, void* y, bool* mask, std::int64_t n, cudaStream_t);

// --- lists of tensors (optimizer.cu, guard.cu) ---

/// Elements of one tensor that one block works on.
inline constexpr std::int64_t kChunk = 8192;
struct Chunk {
  std::int32_t tensor, part;  // elements [part * kChunk, …) of the tensor
};
/// The chunks of all tensors of a table in order.
template <class Entry>
std::vector<Chunk> chunks_of(const std::vector<Entry>& tensors) {
  std::vector<Chunk> chunks;
  for (std::size_t t = 0; t < tensors.size(); ++t)
    for (std::int64_t part = 0; part * kChunk < tensors[t].n; ++part)
      chunks.push_back({static_cast<std::int32_t>(t), static_cast<std::int32_t>(part)});
  return chunks;
}
/// A table and its chunks on the host (kept for the ranges of a launch) and where the caller has uploaded
/// them. Without device tables it holds one tensor, which goes with the launch.
template <class Entry>
struct DeviceList {
  std::vector<Entry> tensors;
  std::vector<Chunk> chunks;
  const Entry* device_tensors = nullptr;
  const Chunk* device_chunks = nullptr;
};

/// One parameter of an update; state pointers that the method does not use are null. Every *_next may be its
/// input.
struct UpdateEntry {
  const void *p, *g;
  void* p_next;
  const float *m, *v, *vmax;  // SGD: m is the velocity; vmax: amsgrad
  float *m_next, *v_next, *vmax_next;
  const double* hyper;  // device: [lr, step, momentum, dampening, weight_decay] or [lr, step, beta1, beta2,
                        // eps, weight_decay]
  std::int64_t n;
};
using UpdateList = DeviceList<UpdateEntry>;
/// p and g: f32 or bf16, one dtype each for the whole list; state is f32. grad_scale: null or a device scalar
/// that multiplies every gradient (clipping).
void sgd(const UpdateList& list, DType p, DType g, bool nesterov, const float* grad_scale, cudaStream_t);
/// decoupled: AdamW. Entries with vmax use amsgrad.
void adam(const UpdateList& list, DType p, DType g, bool decoupled, const float* grad_scale, cudaStream_t);

struct ListEntry {
  const void* x;
  void* y;  // of scale(); may be x
  std::int64_t n;
};
using TensorList = DeviceList<ListEntry>;
/// parts[i] = sum of the squares of chunk i, in double.
void sum_squares_parts(const TensorList& list, DType dtype, double* parts, cudaStream_t);
/// *y = sum of n parts in order; y: f32, bf16 or f64 by `to`.
void sum_parts(const double* parts, std::int64_t n, DType to, void* y, cudaStream_t);
std::size_t sum_squares_scratch_bytes(const TensorList& list);
/// Both: *y = sum of the squares of all elements.
void sum_squares(const TensorList& list, DType dtype, DType to, void* y, void* scratch, cudaStream_t);
/// y = x * *factor for every tensor.
void scale(const TensorList& list, DType dtype, const float* factor, cudaStream_t);
/// *flag = 1 if an element is infinite or NaN, else 0.
void find_non_finite(const TensorList& list, DType dtype, unsigned* flag, cudaStream_t);

}  // namespace onnxddp::cuda

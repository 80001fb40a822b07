// Kernels that map or move elements: elementwise, Cast, Where, layout, indexing, dropout.
#include <map>
#include <memory>

#include "executor/philox.h"
#include "tests/cudaemu/kernels_testing.h"

namespace cudaemu_test {
namespace {

namespace cuda = onnxddp::cuda;
using onnxddp::cuda::broadcast_strides;
using onnxddp::cuda::dense_strides;

class MapKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Schedules, MapKernels, schedules());

double relu(double x) { return x < 0 ? 0 : x; }
const std::map<std::string, double (*)(double)> kUnary = {
    {"Neg", [](double x) { return -x; }},
    {"Abs", [](double x) { return std::abs(x); }},
    {"Sign", [](double x) { return x > 0   ? 1.0
                                   : x < 0 ? -1.0
                                           : 0.0; }},
    {"Relu", relu},
    {"Step", [](double x) { return x > 0 ? 1.0 : 0.0; }},
    {"Reciprocal", [](double x) { return 1 / x; }},
    {"Exp", [](double x) { return std::exp(x); }},
    {"Log", [](double x) { return std::log(x); }},
    {"Sqrt", [](double x) { return std::sqrt(x); }},
    {"Sigmoid", [](double x) { return 1 / (1 + std::exp(-x)); }},
    {"Tanh", [](double x) { return std::tanh(x); }},
    {"Erf", [](double x) { return std::erf(x); }}};

TEST_P(MapKernels, UnaryOps) {
  for (const auto& [op, f] : kUnary) {
    const bool positive = op == "Log" || op == "Sqrt" || op == "Reciprocal";
    for (DType dtype : kFloats) {
      for (std::int64_t n : {0, 1, 23}) {
        const std::int64_t shift = n == 1 ? 1 : 0;
        const Doubles x = random(dtype, n, positive ? 0.1 : -4, 4);
        const Tensor in(dtype, x, shift, stream_), out(dtype, n, 0);
        cuda::unary_kernel(op, dtype)(in.get(), out.get(), n, 0, 0, stream_);
        Doubles expected;
        for (double v : x) expected.push_back(f(v));
        EXPECT_TRUE(near(dtype, out.read(stream_), expected)) << op;
      }
    }
  }
}

TEST_P(MapKernels, UnaryOpsInPlaceIntegersAndLimits) {
  for (DType dtype : {DType::i64, DType::i32}) {
    const Tensor x(dtype, {-3, 0, 5, -7, 9}, 1, stream_);
    cuda::unary_kernel("Relu", dtype)(x.get(), x.get(), 5, 0, 0, stream_);
    cuda::unary_kernel("Neg", dtype)(x.get(), x.get(), 5, 0, 0, stream_);
    EXPECT_EQ(x.read(stream_), (Doubles{0, 0, -5, 0, -9}));
  }
  for (DType dtype : kFloats) {
    const Tensor x(dtype, {-3, -0.5, 0.25, 1, 7, NAN}, 0, stream_), y(dtype, 6, 3), mask(dtype, 6);
    cuda::unary_kernel("Clip", dtype)(x.get(), y.get(), 6, -0.5, 1, stream_);
    cuda::unary_kernel("ClipMask", dtype)(x.get(), mask.get(), 6, -0.5, 1, stream_);
    EXPECT_TRUE(near(dtype, y.read(stream_), {-0.5, -0.5, 0.25, 1, 1, NAN}));
    EXPECT_EQ(mask.read(stream_), (Doubles{0, 1, 1, 1, 0, 0}));
  }
  const Tensor flags(DType::boolean, {1, 0, 1}, 1, stream_), negated(DType::boolean, 3);
  cuda::unary_kernel("Not", DType::boolean)(flags.get(), negated.get(), 3, 0, 0, stream_);
  EXPECT_EQ(negated.read(stream_), (Doubles{0, 1, 0}));
  EXPECT_EQ(cuda::unary_kernel("Exp", DType::i64), nullptr);
  EXPECT_EQ(cuda::binary_kernel("Pow", DType::i64), nullptr);
}

const std::map<std::string, double (*)(double, double)> kBinary = {
    {"Add", [](double a, double b) { return a + b; }},
    {"Sub", [](double a, double b) { return a - b; }},
    {"Mul", [](double a, double b) { return a * b; }},
    {"Div", [](double a, double b) { return a / b; }},
    {"Max", [](double a, double b) { return std::max(a, b); }},
    {"Min", [](double a, double b) { return std::min(a, b); }},
    {"Pow", [](double a, double b) { return std::pow(a, b); }},
    {"Equal", [](double a, double b) { return a == b ? 1.0 : 0.0; }},
    {"Less", [](double a, double b) { return a < b ? 1.0 : 0.0; }},
    {"Greater", [](double a, double b) { return a > b ? 1.0 : 0.0; }},
    {"And", [](double a, double b) { return a != 0 && b != 0 ? 1.0 : 0.0; }},
    {"Or", [](double a, double b) { return a != 0 || b != 0 ? 1.0 : 0.0; }}};

struct Shapes {
  Ints a, b, y;
};
const Shapes kShapes[] = {{{23}, {23}, {23}},
                          {{}, {}, {}},
                          {{0, 3}, {3}, {0, 3}},
                          {{3, 8}, {8}, {3, 8}},
                          {{2, 3, 5}, {3, 1}, {2, 3, 5}},
                          {{4, 1, 3}, {1, 2, 1}, {4, 2, 3}},
                          {{17}, {}, {17}},
                          {{2, 1, 16}, {3, 16}, {2, 3, 16}}};

void check_binary(const std::string& op, DType dtype, const Shapes& s, const Doubles& a, const Doubles& b,
                  std::int64_t shift, cudaStream_t stream) {
  const bool predicate = op == "Equal" || op == "Less" || op == "Greater" || op == "And" || op == "Or";
  const DType to = predicate ? DType::boolean : dtype;
  const Ints sa = broadcast_strides(s.a, dense_strides(s.a), s.y),
             sb = broadcast_strides(s.b, dense_strides(s.b), s.y);
  const auto walk = cuda::make_walk<3>(s.y, {dense_strides(s.y), sa, sb});
  const Tensor left(dtype, a, shift, stream), right(dtype, b, 0, stream), out(to, product(s.y), shift);
  cuda::binary_kernel(op, dtype)(walk, left.get(), right.get(), out.get(), stream);
  Doubles expected;
  each_index(s.y, [&](const Ints& i) {
    const double value = kBinary.at(op)(a[offset_of(i, sa)], b[offset_of(i, sb)]);
    expected.push_back(dtype == DType::i32 || dtype == DType::i64 ? std::trunc(value) : value);
  });
  EXPECT_TRUE(near(dtype, out.read(stream), expected)) << op << " of shape case " << &s - kShapes;
}

TEST_P(MapKernels, BinaryOpsBroadcast) {
  int turn = 0;
  for (const auto& entry : kBinary) {
    const std::string& op = entry.first;
    for (DType dtype : {DType::f32, DType::bf16, DType::i64, DType::i32, DType::boolean}) {
      if (cuda::binary_kernel(op, dtype) == nullptr) continue;
      const bool whole = dtype != DType::f32 && dtype != DType::bf16;
      for (const Shapes& s : kShapes) {
        if (op != "Add" && ++turn % 3 != 0) continue;  // every shape with one op, all ops with some shapes
        Doubles a = random(dtype, product(s.a), op == "Pow" ? 0.2 : -4, 4),
                b = random(dtype, product(s.b), 0.5, 4);
        if (whole)
          for (double& x : b) x = dtype == DType::boolean ? x : std::max(1.0, x);
        check_binary(op, dtype, s, a, b, turn % 2, stream_);
      }
    }
  }
}

TEST_P(MapKernels, BinaryInPlaceAndWholeDivision) {
  const auto walk = cuda::make_walk<3>({4}, {{1}, {1}, {1}});
  const Tensor a(DType::i64, {7, -7, 5, -9223372036854775807.0 - 1}, 0, stream_),
      b(DType::i64, {2, 2, 0, -1}, 0, stream_);
  cuda::binary_kernel("Div", DType::i64)(walk, a.get(), b.get(), a.get(), stream_);
  EXPECT_EQ(a.read(stream_), (Doubles{3, -3, 0, -9223372036854775807.0 - 1}));
}

TEST_P(MapKernels, WalksMergeAndRefuse) {
  EXPECT_EQ((cuda::make_walk<1>({2, 3, 4}, {{12, 4, 1}}).rank), 1);
  EXPECT_EQ((cuda::make_walk<2>({2, 3, 4}, {{12, 4, 1}, {4, 0, 1}}).rank), 3);
  const Ints two(9, 2), odd = {1 << 16, 1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1};
  EXPECT_THROW((cuda::make_walk<1>(two, {odd})), onnxddp::InternalError);
  for (std::int64_t d : {1, 2, 3, 7, 641, 65536, 2147483647}) {
    for (std::int64_t n :
         {std::int64_t{0}, d - 1, d, 2147483647 / d * d, std::int64_t{2147483647}, 4000000000 * d + 1}) {
      std::int64_t quotient = n;
      const std::int64_t rest = cuda::Divider(d).split(quotient);
      EXPECT_EQ(quotient, n / d);
      EXPECT_EQ(rest, n % d);
    }
  }
}

TEST_P(MapKernels, WhereOfEveryWidth) {
  for (DType dtype : {DType::u8, DType::bf16, DType::f32, DType::i64}) {
    for (const Shapes& s : kShapes) {
      const Doubles c = random(DType::boolean, product(s.y), -1, 1),
                    a = random(DType::u8, product(s.a), 0, 100), b = random(DType::u8, product(s.b), 0, 100);
      const Ints sy = dense_strides(s.y), sa = broadcast_strides(s.a, dense_strides(s.a), s.y),
                 sb = broadcast_strides(s.b, dense_strides(s.b), s.y);
      const Tensor condition(DType::boolean, c, 0, stream_), left(dtype, a, 0, stream_),
          right(dtype, b, 1, stream_), out(dtype, product(s.y));
      cuda::where(cuda::make_walk<4>(s.y, {sy, sy, sa, sb}), condition.as<bool>(), left.get(), right.get(),
                  out.get(), width_of(dtype), stream_);
      Doubles expected;
      each_index(s.y, [&](const Ints& i) {
        expected.push_back(c[offset_of(i, sy)] != 0 ? a[offset_of(i, sa)] : b[offset_of(i, sb)]);
      });
      EXPECT_EQ(out.read(stream_), expected);
    }
  }
}

TEST_P(MapKernels, CastsOfEveryPair) {
  const DType all[] = {DType::f32, DType::bf16, DType::f64, DType::i64,    DType::i32,
                       DType::i16, DType::i8,   DType::u8,  DType::boolean};
  for (DType from : all) {
    for (DType to : all) {
      const Doubles x = random(from, from == to ? 1 : 19, 0, 100);
      const Tensor in(from, x, 1, stream_), out(to, static_cast<std::int64_t>(x.size()));
      cuda::cast(in.get(), from, out.get(), to, static_cast<std::int64_t>(x.size()), stream_);
      Doubles expected;
      for (double v : x) expected.push_back(rounded(to, v));
      EXPECT_EQ(out.read(stream_), expected) << static_cast<int>(from) << " to " << static_cast<int>(to);
    }
  }
  for (std::int64_t n : {0, 16, 37}) {  // the vector path
    const Doubles x = random(DType::f32, n);
    const Tensor wide(DType::f32, x, 0, stream_), narrow(DType::bf16, n), back(DType::f32, n);
    cuda::cast(wide.get(), DType::f32, narrow.get(), DType::bf16, n, stream_);
    cuda::cast(narrow.get(), DType::bf16, back.get(), DType::f32, n, stream_);
    Doubles expected;
    for (double v : x) expected.push_back(rounded(DType::bf16, v));
    EXPECT_EQ(back.read(stream_), expected);
  }
  const Tensor edge(DType::f32, {NAN, 1e30, -1e30, -1.9, 0.5}, 0, stream_), whole(DType::i32, 5),
      flags(DType::boolean, 5);
  cuda::cast(edge.get(), DType::f32, whole.get(), DType::i32, 5, stream_);
  cuda::cast(edge.get(), DType::f32, flags.get(), DType::boolean, 5, stream_);
  EXPECT_EQ(whole.read(stream_), (Doubles{0, 2147483647.0, -2147483648.0, -1, 0}));
  EXPECT_EQ(flags.read(stream_), (Doubles{1, 1, 1, 1, 1}));
}

/// Runs a plan over numbered elements and compares with the walk by hand; y starts as zeros.
void check_copy(const cuda::CopyPlan& plan, DType dtype, std::int64_t x_size, const Ints& size,
                const Ints& y_strides, const Ints& x_strides, std::int64_t y_size, std::int64_t shift,
                cudaStream_t stream) {
  Doubles x(static_cast<std::size_t>(x_size)), expected(static_cast<std::size_t>(y_size), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i % 120 + 1);
  each_index(size, [&](const Ints& i) {
    expected[offset_of(i, y_strides) + static_cast<std::size_t>(plan.y_offset)] =
        x[static_cast<std::size_t>(static_cast<std::int64_t>(offset_of(i, x_strides)) + plan.x_offset)];
  });
  const Tensor in(dtype, x, shift, stream), out(dtype, y_size, shift);
  cuda::fill(out.get(), y_size, 0, width_of(dtype), stream);
  cuda::copy(plan, in.get(), out.get(), stream);
  EXPECT_EQ(out.read(stream), expected) << "width " << width_of(dtype) << " shift " << shift;
}

TEST_P(MapKernels, TransposeExpandSliceAndConcat) {
  for (DType dtype : {DType::u8, DType::bf16, DType::f32, DType::i64}) {
    const std::size_t width = width_of(dtype);
    for (std::int64_t shift : {0, 1}) {
      for (const Ints& shape : {Ints{3, 5}, Ints{37, 20}, Ints{0, 4}}) {
        const Ints turned = {shape[1], shape[0]};
        check_copy(cuda::plan_transpose(shape, {1, 0}, width), dtype, product(shape), turned,
                   dense_strides(turned), {1, shape[1]}, product(shape), shift, stream_);
      }
      check_copy(cuda::plan_transpose({2, 3, 4, 5}, {0, 2, 3, 1}, width), dtype, 120, {2, 4, 5, 3},
                 {60, 15, 3, 1}, {60, 5, 1, 20}, 120, shift, stream_);
      check_copy(cuda::plan_transpose({2, 3, 16}, {1, 0, 2}, width), dtype, 96, {3, 2, 16}, {32, 16, 1},
                 {16, 48, 1}, 96, shift, stream_);  // rows stay whole: 128-bit accesses
      check_copy(cuda::plan_expand({2, 1, 3}, {2, 4, 3}, width), dtype, 6, {2, 4, 3}, {12, 3, 1}, {3, 0, 1},
                 24, shift, stream_);
      check_copy(cuda::plan_expand({}, {7}, width), dtype, 1, {7}, {1}, {0}, 7, shift, stream_);
      check_copy(cuda::plan_slice({4, 10}, {3, 9}, {-1, -2}, {2, 5}, width), dtype, 40, {2, 5}, {5, 1},
                 {-10, -2}, 10, shift, stream_);
      check_copy(cuda::plan_slice({6, 8}, {1, 0}, {2, 1}, {2, 8}, width), dtype, 48, {2, 8}, {8, 1}, {16, 1},
                 16, shift, stream_);
      check_copy(cuda::plan_place({2, 3}, {2, 7}, {0, 4}, width), dtype, 6, {2, 3}, {7, 1}, {3, 1}, 14, shift,
                 stream_);
    }
  }
}

TEST_P(MapKernels, PadFillAndSumPieces) {
  const Tensor x(DType::f32, {1, 2, 3, 4}, 1, stream_), y(DType::f32, 12, 1);
  const float seven = 7;
  std::uint32_t bits;
  std::memcpy(&bits, &seven, 4);
  cuda::pad(x.get(), {2, 2}, y.get(), {3, 4}, {0, 1}, bits, 4, stream_);
  EXPECT_EQ(y.read(stream_), (Doubles{7, 1, 2, 7, 7, 3, 4, 7, 7, 7, 7, 7}));
  for (DType dtype : {DType::f32, DType::bf16, DType::i64, DType::i32}) {
    const Tensor a(dtype, {1, 2, 3, 4}, 1, stream_), b(dtype, {10, 20}, 0, stream_), sum(dtype, 6, 1);
    cuda::fill(sum.get(), 6, 0, width_of(dtype), stream_);
    cuda::add_to(cuda::plan_place({4}, {6}, {1}, width_of(dtype)), dtype, a.get(), sum.get(), stream_);
    cuda::add_to(cuda::plan_copy({2}, {-3}, {1}, width_of(dtype), 5), dtype, b.get(), sum.get(), stream_);
    EXPECT_EQ(sum.read(stream_), (Doubles{0, 1, 22, 3, 4, 10}));
  }
  for (DType dtype : {DType::u8, DType::bf16, DType::f32, DType::i64}) {
    const Tensor zeros(dtype, 37);
    cuda::fill(zeros.get(), 37, 0, width_of(dtype), stream_);
    EXPECT_EQ(zeros.read(stream_), Doubles(37, 0.0));
  }
}

/// The fault word as its two halves; {0, 0} where it is untouched.
std::pair<std::int64_t, std::int64_t> fault_of(const Tensor& word, cudaStream_t stream) {
  unsigned long long value = 0;
  EXPECT_EQ(cudaMemcpyAsync(&value, word.get(), 8, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  if (value == ~0ull) return {0, 0};
  return {static_cast<std::int64_t>(value >> 32), static_cast<std::int32_t>(value & 0xFFFFFFFFu)};
}

TEST_P(MapKernels, GatherOfEveryWidth) {
  for (bool wide : {true, false}) {
    const Tensor indices(wide ? DType::i64 : DType::i32, {2, -1, 0, 2, -4}, 1, stream_);
    for (DType dtype : {DType::u8, DType::bf16, DType::f32, DType::i64}) {
      for (std::int64_t inner : {1, 3, 16}) {
        const cuda::Table table{2, 4, inner, 5};
        const Doubles x = random(DType::u8, 8 * inner, 0, 100);
        const Tensor in(dtype, x, inner == 3, stream_), out(dtype, 10 * inner),
            fault(DType::i64, {-1}, 0, stream_);
        cuda::gather(table, width_of(dtype), in.get(), indices.get(), wide, out.get(),
                     fault.as<cuda::FaultWord>(), stream_);
        Doubles expected;
        for (std::int64_t outer = 0; outer < 2; ++outer)
          for (std::int64_t k : {2, 3, 0, 2, 0})
            for (std::int64_t j = 0; j < inner; ++j)
              expected.push_back(x[static_cast<std::size_t>((outer * 4 + k) * inner + j)]);
        EXPECT_EQ(out.read(stream_), expected);
        EXPECT_EQ(fault_of(fault, stream_), std::make_pair(std::int64_t{0}, std::int64_t{0}));
      }
    }
  }
  const Tensor bad(DType::i64, {0, 7, -5}, 0, stream_), x(DType::f32, {1, 2}, 0, stream_), y(DType::f32, 3),
      fault(DType::i64, {-1}, 0, stream_);
  cuda::gather({1, 2, 1, 3}, 4, x.get(), bad.get(), true, y.get(), fault.as<cuda::FaultWord>(), stream_);
  EXPECT_EQ(y.read(stream_), (Doubles{1, 0, 0}));
  EXPECT_EQ(fault_of(fault, stream_), std::make_pair(std::int64_t{1}, std::int64_t{7}));
  const Tensor none(DType::i64, Doubles{}, 0, stream_), nothing(DType::f32, 0);
  cuda::gather({1, 2, 1, 0}, 4, x.get(), none.get(), true, nothing.get(), nullptr, stream_);
}

TEST_P(MapKernels, GatherGradAddsInOrder) {
  for (DType dtype : kFloats) {
    for (const cuda::Table& t : {cuda::Table{1, 5, 3, 8}, cuda::Table{2, 300, 2, 40}, cuda::Table{1, 4, 1, 0},
                                 cuda::Table{1, 1, 1, 1}}) {
      Doubles indices;
      std::uniform_int_distribution<int> pick(-static_cast<int>(t.size), static_cast<int>(t.size) - 1);
      for (std::int64_t i = 0; i < t.count; ++i) indices.push_back(i % 3 == 0 ? 0 : pick(random_));
      const Doubles dy = random(dtype, t.outer * t.count * t.inner);
      Doubles expected(static_cast<std::size_t>(t.outer * t.size * t.inner), 0.0);
      for (std::int64_t o = 0; o < t.outer; ++o)
        for (std::int64_t i = 0; i < t.count; ++i)
          for (std::int64_t j = 0; j < t.inner; ++j) {
            const auto raw = static_cast<std::int64_t>(indices[static_cast<std::size_t>(i)]),
                       k = raw < 0 ? raw + t.size : raw;
            expected[static_cast<std::size_t>((o * t.size + k) * t.inner + j)] +=
                dy[static_cast<std::size_t>((o * t.count + i) * t.inner + j)];
          }
      const Tensor where(DType::i32, indices, 1, stream_), from(dtype, dy, 1, stream_),
          to(dtype, t.outer * t.size * t.inner, 1), fault(DType::i64, {-1}, 0, stream_);
      const Scratch scratch(cuda::gather_grad_scratch_bytes(t));
      cuda::gather_grad(t, dtype, from.get(), where.get(), false, to.get(), scratch.get(),
                        fault.as<cuda::FaultWord>(), stream_);
      EXPECT_TRUE(near(dtype, to.read(stream_), expected));
    }
  }
  const Tensor indices(DType::i64, {1, 9, 1}, 0, stream_), dy(DType::f32, {1, 2, 3}, 0, stream_),
      dx(DType::f32, 2), fault(DType::i64, {-1}, 0, stream_);
  const cuda::Table table{1, 2, 1, 3};
  const Scratch scratch(cuda::gather_grad_scratch_bytes(table));
  cuda::gather_grad(table, DType::f32, dy.get(), indices.get(), true, dx.get(), scratch.get(),
                    fault.as<cuda::FaultWord>(), stream_);
  EXPECT_EQ(dx.read(stream_), (Doubles{0, 4}));
  EXPECT_EQ(fault_of(fault, stream_), std::make_pair(std::int64_t{1}, std::int64_t{9}));
}

TEST_P(MapKernels, DropoutHasTheMasksOfTheCpu) {
  struct Case {
    std::int64_t inner, rank, world, n;
  };
  for (const auto& [inner, rank, world, n] :
       {Case{0, 1, 2, 23}, {5, 1, 3, 25}, {8, 1, 2, 40}, {7, 0, 1, 21}, {3, 0, 1, 0}}) {
    for (DType dtype : kFloats) {
      const std::int64_t state[5] = {1234, 17, 2, rank, world};
      const auto bits = onnxddp::DropoutBits::from(state, 99, 0.3, inner);
      const Tensor device_state(
          DType::i64, {1234, 17, 2, static_cast<double>(rank), static_cast<double>(world)}, 0, stream_);
      const Doubles x = random(dtype, n);
      const Tensor in(dtype, x, 1, stream_), out(dtype, n, 1), mask(DType::boolean, n, 1);
      cuda::dropout(dtype, in.get(), device_state.as<std::int64_t>(), 99, 0.3, inner, out.get(),
                    mask.as<bool>(), n, stream_);
      Doubles kept, expected;
      for (std::int64_t i = 0; i < n; ++i) {
        kept.push_back(bits.keep(i) ? 1.0 : 0.0);
        const float y = static_cast<float>(x[static_cast<std::size_t>(i)]) * static_cast<float>(1.0 / 0.7);
        expected.push_back(bits.keep(i) ? rounded(dtype, static_cast<double>(y)) : 0.0);
      }
      EXPECT_EQ(mask.read(stream_), kept);
      EXPECT_EQ(out.read(stream_), expected);
      cuda::dropout(dtype, in.get(), device_state.as<std::int64_t>(), 99, 0.3, inner, in.get(), nullptr, n,
                    stream_);
      EXPECT_EQ(in.read(stream_), expected);
    }
  }
}

}  // namespace
}  // namespace cudaemu_test

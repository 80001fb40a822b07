// DType, Dim, Shape, TensorType: what a value is, before any data exists.
#pragma once

#include <compare>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// Element types, by their short names in the text format (f32, bf16, i64, bool, …).
enum class DType : std::uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64, boolean };

std::string_view dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
/// Bytes of one element.
std::size_t dtype_size(DType dtype);
bool is_float(DType dtype);
/// Signed and unsigned integers; bool is neither float nor integer.
bool is_integer(DType dtype);

using DimBindings = std::map<std::string, std::int64_t, std::less<>>;

/// One dimension: a canonical integer polynomial over symbols (`N`, `128*N`, `N+1`). A floor division that
/// does not come out even is an opaque atom, printed `floor(P,Q)`. Equal polynomials compare equal. Overflow
/// of 64 bits throws Error.
class Dim {
 public:
  Dim() = default;
  Dim(std::int64_t constant)
      : constant_(constant) {}  // NOLINT(google-explicit-constructor): dims are numbers
  static Dim symbol(std::string name);

  bool is_constant() const { return terms_.empty(); }
  /// The number; throws InternalError unless is_constant().
  std::int64_t value() const;
  /// The symbols that occur, also inside floor atoms.
  std::set<std::string> symbols() const;
  /// Replaces bound symbols; others stay.
  Dim bind(const DimBindings& bindings) const;

  Dim operator-() const;
  friend Dim operator+(const Dim& a, const Dim& b);
  friend Dim operator-(const Dim& a, const Dim& b);
  friend Dim operator*(const Dim& a, const Dim& b);
  Dim& operator+=(const Dim& b) { return *this = *this + b; }
  Dim& operator*=(const Dim& b) { return *this = *this * b; }
  /// floor(a / b); exact when b divides every coefficient, else an atom. Division by zero throws Error.
  friend Dim floor_div(const Dim& a, const Dim& b);
  /// a / b if b divides a exactly as polynomials (b a single term), else nothing.
  friend std::optional<Dim> exact_div(const Dim& a, const Dim& b);

  bool operator==(const Dim& other) const = default;
  /// A total order for use in containers; not the order of numbers.
  bool operator<(const Dim& other) const;

  std::string str() const;
  /// Inverse of str(); throws Error on anything else.
  static Dim parse(std::string_view text);

 private:
  struct Term {
    std::vector<std::string> atoms;  // sorted; a symbol or the text of a floor atom
    std::int64_t factor = 0;         // never 0
    bool operator==(const Term&) const = default;
  };
  void add_term(Term term);

  std::int64_t constant_ = 0;
  std::vector<Term> terms_;  // sorted by atoms
};

/// Arithmetic, exact `floor(a/b)`, `exact_div`: see Dim. (Friends take the namespace's visibility only when
/// declared here.)
Dim operator+(const Dim& a, const Dim& b);
Dim operator-(const Dim& a, const Dim& b);
Dim operator*(const Dim& a, const Dim& b);
Dim floor_div(const Dim& a, const Dim& b);
std::optional<Dim> exact_div(const Dim& a, const Dim& b);
std::ostream& operator<<(std::ostream& out, const Dim& dim);

using Dims = std::vector<Dim>;
using Shape = std::vector<Dim>;
using Ints = std::vector<std::int64_t>;

/// Product of the dimensions (1 for a scalar).
Dim numel(const Shape& shape);
std::int64_t numel(const Ints& shape);
bool is_static(const Shape& shape);
/// The numbers of a static shape; throws InternalError otherwise.
Ints static_shape(const Shape& shape);
Shape to_shape(const Ints& dims);
Shape bind_shape(const Shape& shape, const DimBindings& bindings);
/// `[N,3]`
std::string shape_str(const Shape& shape);
std::string shape_str(const Ints& shape);
/// NumPy broadcasting (ONNX "multidirectional"); throws Error naming both shapes if they do not fit. A
/// symbolic dimension against a different dimension other than 1 does not fit.
Shape broadcast(const Shape& a, const Shape& b);
/// Normalises a negative axis; throws Error when out of -rank..rank-1.
std::int64_t normal_axis(std::int64_t axis, std::size_t rank);

/// Type of a tensor: `f32[N,784]`.
struct TensorType {
  DType dtype = DType::f32;
  Shape shape;
  bool operator==(const TensorType&) const = default;
  std::string str() const;
  static TensorType parse(std::string_view text);
};
std::ostream& operator<<(std::ostream& out, const TensorType& type);

/// Shortest text that reads back to the same double (`1e-05`, `0.1`, `inf`, `nan`).
std::string number_str(double value);
/// The double whose shortest decimal form is that of the float: 1e-5f -> 1e-5. ONNX attributes are floats;
/// users mean the decimal they wrote.
double decimal_of(float value);

}  // namespace onnxddp

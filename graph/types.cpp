#include "graph/types.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ostream>

namespace onnxddp {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::size_t size;
};
constexpr std::array<DTypeInfo, 13> kDTypes = {{{DType::f32, "f32", 4},
                                                {DType::f64, "f64", 8},
                                                {DType::f16, "f16", 2},
                                                {DType::bf16, "bf16", 2},
                                                {DType::i8, "i8", 1},
                                                {DType::i16, "i16", 2},
                                                {DType::i32, "i32", 4},
                                                {DType::i64, "i64", 8},
                                                {DType::u8, "u8", 1},
                                                {DType::u16, "u16", 2},
                                                {DType::u32, "u32", 4},
                                                {DType::u64, "u64", 8},
                                                {DType::boolean, "bool", 1}}};

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  if (__builtin_add_overflow(a, b, &out)) throw Error("a tensor dimension overflows 64 bits");
  return out;
}
std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out)) throw Error("a tensor dimension overflows 64 bits");
  return out;
}
std::int64_t floor_div_int(std::int64_t a, std::int64_t b) {
  if (b == 0) throw Error("division by zero in a shape computation");
  if (b == -1) return checked_mul(a, -1);
  return a / b - ((a % b != 0) && ((a < 0) != (b < 0)) ? 1 : 0);
}

}  // namespace

std::string_view dtype_name(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }
std::size_t dtype_size(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].size; }
std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeInfo& info : kDTypes)
    if (info.name == name) return info.dtype;
  return std::nullopt;
}
bool is_float(DType dtype) { return dtype <= DType::bf16; }
bool is_integer(DType dtype) { return dtype >= DType::i8 && dtype <= DType::u64; }

Dim Dim::symbol(std::string name) {
  Dim dim;
  dim.terms_.push_back({{std::move(name)}, 1});
  return dim;
}

std::int64_t Dim::value() const {
  CHECK(is_constant(), "dimension ", str(), " is symbolic");
  return constant_;
}

bool Dim::operator<(const Dim& other) const {
  if (constant_ != other.constant_) return constant_ < other.constant_;
  return std::lexicographical_compare(terms_.begin(), terms_.end(), other.terms_.begin(), other.terms_.end(),
                                      [](const Term& a, const Term& b) {
                                        return a.atoms != b.atoms ? a.atoms < b.atoms : a.factor < b.factor;
                                      });
}

void Dim::add_term(Term term) {
  if (term.factor == 0) return;
  if (term.atoms.empty()) {
    constant_ = checked_add(constant_, term.factor);
    return;
  }
  auto at = std::lower_bound(terms_.begin(), terms_.end(), term,
                             [](const Term& a, const Term& b) { return a.atoms < b.atoms; });
  if (at == terms_.end() || at->atoms != term.atoms) {
    terms_.insert(at, std::move(term));
    return;
  }
  at->factor = checked_add(at->factor, term.factor);
  if (at->factor == 0) terms_.erase(at);
}

Dim operator+(const Dim& a, const Dim& b) {
  Dim out = a;
  out.constant_ = checked_add(out.constant_, b.constant_);
  for (const Dim::Term& term : b.terms_) out.add_term(term);
  return out;
}

Dim Dim::operator-() const { return *this * Dim(-1); }
Dim operator-(const Dim& a, const Dim& b) { return a + (-b); }

Dim operator*(const Dim& a, const Dim& b) {
  Dim out(checked_mul(a.constant_, b.constant_));
  for (const Dim::Term& term : a.terms_) out.add_term({term.atoms, checked_mul(term.factor, b.constant_)});
  for (const Dim::Term& term : b.terms_) out.add_term({term.atoms, checked_mul(term.factor, a.constant_)});
  for (const Dim::Term& s : a.terms_) {
    for (const Dim::Term& t : b.terms_) {
      Dim::Term product{s.atoms, checked_mul(s.factor, t.factor)};
      product.atoms.insert(product.atoms.end(), t.atoms.begin(), t.atoms.end());
      std::sort(product.atoms.begin(), product.atoms.end());
      out.add_term(std::move(product));
    }
  }
  return out;
}

std::optional<Dim> exact_div(const Dim& a, const Dim& b) {
  if (b == Dim(0)) return std::nullopt;
  if (a == b) return Dim(1);
  // The divisor: a constant or a single term.
  Dim::Term divisor{{}, b.constant_};
  if (!b.terms_.empty()) {
    if (b.terms_.size() > 1 || b.constant_ != 0) {
      // a == k * b for a constant k: compare leading terms, then the whole.
      if (a.terms_.size() != b.terms_.size() || a.terms_[0].factor % b.terms_[0].factor != 0)
        return std::nullopt;
      const Dim quotient(a.terms_[0].factor / b.terms_[0].factor);
      return quotient * b == a ? std::optional<Dim>(quotient) : std::nullopt;
    }
    divisor = b.terms_[0];
  }
  std::vector<Dim::Term> terms = a.terms_;
  if (a.constant_ != 0) terms.push_back({{}, a.constant_});
  Dim out;
  for (Dim::Term& term : terms) {
    if (term.factor % divisor.factor != 0) return std::nullopt;
    term.factor /= divisor.factor;
    for (const std::string& atom : divisor.atoms) {
      auto at = std::find(term.atoms.begin(), term.atoms.end(), atom);
      if (at == term.atoms.end()) return std::nullopt;
      term.atoms.erase(at);
    }
    out.add_term(std::move(term));
  }
  return out;
}

Dim floor_div(const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant()) return Dim(floor_div_int(a.value(), b.value()));
  if (b == Dim(0)) throw Error("division by zero in a shape computation");
  if (auto exact = exact_div(a, b)) return *exact;
  return Dim::symbol(cat("floor(", a.str(), ",", b.str(), ")"));
}

std::set<std::string> Dim::symbols() const {
  std::set<std::string> out;
  for (const Term& term : terms_) {
    for (const std::string& atom : term.atoms) {
      if (atom.rfind("floor(", 0) != 0) {
        out.insert(atom);
        continue;
      }
      // Identifiers inside the atom's text.
      std::string word;
      for (std::size_t i = 0; i <= atom.size(); ++i) {
        const char c = i < atom.size() ? atom[i] : ' ';
        if (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.') {
          word += c;
          continue;
        }
        if (!word.empty() && word != "floor" && !std::isdigit(static_cast<unsigned char>(word[0])))
          out.insert(word);
        word.clear();
      }
    }
  }
  return out;
}

namespace {

/// Recursive-descent reader of Dim texts: sum of products of numbers, symbols, floor(sum,sum).
class DimParser {
 public:
  explicit DimParser(std::string_view text, const DimBindings* bindings = nullptr)
      : text_(text), bindings_(bindings) {}
  Dim all() {
    Dim out = sum();
    if (at_ != text_.size()) fail();
    return out;
  }

 private:
  [[noreturn]] void fail() const { throw Error(cat("'", text_, "' is not a dimension")); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  Dim sum() {
    bool negative = peek() == '-';
    if (negative) ++at_;
    Dim out = negative ? -product() : product();
    while (peek() == '+' || peek() == '-') {
      negative = text_[at_++] == '-';
      out = negative ? out - product() : out + product();
    }
    return out;
  }
  Dim product() {
    Dim out = factor();
    while (peek() == '*') {
      ++at_;
      out = out * factor();
    }
    return out;
  }
  Dim factor() {
    if (std::isdigit(static_cast<unsigned char>(peek()))) {
      std::int64_t number = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), number);
      if (error != std::errc()) fail();
      at_ = static_cast<std::size_t>(end - text_.data());
      return Dim(number);
    }
    std::string word;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_' || peek() == '.')
      word += text_[at_++];
    if (word.empty()) fail();
    if (word == "floor" && peek() == '(') {
      if (++depth_ > 64) fail();
      ++at_;
      const Dim numerator = sum();
      if (peek() != ',') fail();
      ++at_;
      const Dim denominator = sum();
      if (peek() != ')') fail();
      ++at_;
      --depth_;
      return floor_div(numerator, denominator);
    }
    if (bindings_ != nullptr) {
      const auto bound = bindings_->find(word);
      if (bound != bindings_->end()) return Dim(bound->second);
    }
    return Dim::symbol(word);
  }

  std::string_view text_;
  const DimBindings* bindings_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

Dim Dim::parse(std::string_view text) { return DimParser(text).all(); }

Dim Dim::bind(const DimBindings& bindings) const {
  if (is_constant()) return *this;
  Dim out(constant_);
  for (const Term& term : terms_) {
    Dim product(term.factor);
    for (const std::string& atom : term.atoms) product = product * DimParser(atom, &bindings).all();
    out = out + product;
  }
  return out;
}

std::string Dim::str() const {
  std::string out;
  for (const Term& term : terms_) {
    if (!out.empty() && term.factor > 0) out += '+';
    if (term.factor == -1) {
      out += '-';
    } else if (term.factor != 1) {
      out += std::to_string(term.factor) + '*';
    }
    for (std::size_t i = 0; i < term.atoms.size(); ++i) out += (i > 0 ? "*" : "") + term.atoms[i];
  }
  if (constant_ != 0 || out.empty())
    out += (!out.empty() && constant_ > 0 ? "+" : "") + std::to_string(constant_);
  return out;
}
std::ostream& operator<<(std::ostream& out, const Dim& dim) { return out << dim.str(); }

Dim numel(const Shape& shape) {
  Dim out(1);
  for (const Dim& dim : shape) out *= dim;
  return out;
}
std::int64_t numel(const Ints& shape) {
  std::int64_t out = 1;
  for (std::int64_t dim : shape) out = checked_mul(out, dim);
  return out;
}
bool is_static(const Shape& shape) {
  return std::all_of(shape.begin(), shape.end(), [](const Dim& d) { return d.is_constant(); });
}
Ints static_shape(const Shape& shape) {
  Ints out;
  out.reserve(shape.size());
  for (const Dim& dim : shape) out.push_back(dim.value());
  return out;
}
Shape to_shape(const Ints& dims) { return Shape(dims.begin(), dims.end()); }
Shape bind_shape(const Shape& shape, const DimBindings& bindings) {
  Shape out;
  for (const Dim& dim : shape) out.push_back(dim.bind(bindings));
  return out;
}

std::string shape_str(const Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? "," : "") + shape[i].str();
  return out + "]";
}
std::string shape_str(const Ints& shape) { return shape_str(to_shape(shape)); }

Shape broadcast(const Shape& a, const Shape& b) {
  const std::size_t rank = std::max(a.size(), b.size());
  Shape out(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    const Dim x = i + a.size() >= rank ? a[i + a.size() - rank] : Dim(1);
    const Dim y = i + b.size() >= rank ? b[i + b.size() - rank] : Dim(1);
    if (x == y || y == Dim(1)) {
      out[i] = x;
    } else if (x == Dim(1)) {
      out[i] = y;
    } else {
      throw Error(cat("shapes ", shape_str(a), " and ", shape_str(b), " do not broadcast"));
    }
  }
  return out;
}

std::int64_t normal_axis(std::int64_t axis, std::size_t rank) {
  const auto r = static_cast<std::int64_t>(rank);
  if (axis < -r || axis >= r) throw Error(cat("axis ", axis, " is out of range for rank ", rank));
  return axis < 0 ? axis + r : axis;
}

std::string TensorType::str() const { return std::string(dtype_name(dtype)) + shape_str(shape); }
std::ostream& operator<<(std::ostream& out, const TensorType& type) { return out << type.str(); }

TensorType TensorType::parse(std::string_view text) {
  const std::size_t open = text.find('[');
  const std::optional<DType> dtype = dtype_from_name(text.substr(0, open));
  if (!dtype || open == std::string_view::npos || text.back() != ']')
    throw Error(cat("'", text, "' is not a type"));
  TensorType type{*dtype, {}};
  std::string_view inner = text.substr(open + 1, text.size() - open - 2);
  int depth = 0;
  std::size_t start = 0;
  for (std::size_t i = 0; i <= inner.size() && !inner.empty(); ++i) {
    if (i < inner.size() && inner[i] == '(') ++depth;
    if (i < inner.size() && inner[i] == ')') --depth;
    if (i == inner.size() || (inner[i] == ',' && depth == 0)) {
      type.shape.push_back(Dim::parse(inner.substr(start, i - start)));
      start = i + 1;
    }
  }
  return type;
}

std::string number_str(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return std::string(buffer.data(), result.ptr);
}

double decimal_of(float value) {
  if (!std::isfinite(value)) return static_cast<double>(value);
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  double out = 0;
  std::from_chars(buffer.data(), result.ptr, out);
  return out;
}

}  // namespace onnxddp

#include "importer/data/npy.h"

#include <algorithm>
#include <charconv>
#include <optional>

namespace onnxddp {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kMaxHeader = 1U << 20;
constexpr std::size_t kMaxRank = 16;

/// NumPy's codes without the byte order.
struct Code {
  std::string_view code;
  DType dtype;
};
constexpr Code kCodes[] = {{"b1", DType::boolean}, {"i1", DType::i8},  {"i2", DType::i16},
                           {"i4", DType::i32},     {"i8", DType::i64}, {"u1", DType::u8},
                           {"u2", DType::u16},     {"u4", DType::u32}, {"u8", DType::u64},
                           {"f2", DType::f16},     {"f4", DType::f32}, {"f8", DType::f64}};

[[noreturn]] void refuse_dtype(const std::string& descr, const std::string& place) {
  const char kind = descr.size() > 1 ? descr[1] : '?';
  std::string what = "elements of an unsupported type",
              hint = "convert it first, e.g. numpy.asarray(x, dtype=numpy.float32)";
  if (kind == 'O') {
    what = "Python objects, which are never read (loading them can run code)";
    hint = "save numbers: numpy.asarray(list_of_rows, dtype=numpy.float32); ragged rows must be padded first";
  } else if (kind == 'S' || kind == 'U' || kind == 'a') {
    what = "strings";
    hint = "save numbers: names, y = numpy.unique(x, return_inverse=True) gives class indices";
  } else if (kind == 'V') {
    what = "raw bytes or records";
    hint = "save each field as an array of its own; bfloat16 must be converted: x.astype(numpy.float32)";
  } else if (kind == 'c') {
    what = "complex numbers";
    hint = "save real and imaginary part as two arrays";
  } else if (kind == 'M' || kind == 'm') {
    what = "dates or times";
    hint = "save numbers: x.astype(numpy.int64)";
  }
  throw Error(cat("the array holds ", what)).at(cat("dtype ", in_quotes(descr))).in(place).hint(hint);
}

/// The dict literal {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }, keys in any order.
class HeaderText {
 public:
  HeaderText(std::string_view text, const std::string& place) : text_(text), place_(place) {}

  NpyHeader parse() {
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr" && !descr_) {
        descr_ = descr();
      } else if (key == "fortran_order" && !fortran_) {
        fortran_ = boolean();
      } else if (key == "shape" && !shape_) {
        shape_ = tuple();
      } else {
        fail(cat("unexpected or repeated key ", in_quotes(key)));
      }
      if (!accept(',') && peek() != '}') fail("',' or '}' expected");
    }
    if (peek() != '\0') fail("text behind the dict");
    if (!descr_ || !fortran_ || !shape_) fail("descr, fortran_order or shape is missing");
    NpyHeader out;
    out.fortran = *fortran_;
    out.shape = *shape_;
    set_dtype(out);
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error("the .npy header is damaged: " + why).at(cat("header byte ", position_)).in(place_);
  }

  char peek() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) ++position_;
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++position_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(cat("'", c, "' expected"));
  }

  std::string string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail("a string expected");
    const std::size_t end = text_.find(quote, position_ + 1);
    if (end == std::string_view::npos) fail("a string without end");
    std::string out(text_.substr(position_ + 1, end - position_ - 1));
    position_ = end + 1;
    return out;
  }

  std::string descr() {
    if (peek() == '[') {
      throw Error("the array holds records (a structured dtype)")
          .in(place_)
          .hint("save each field as an array of its own: numpy.savez(f, a=x['a'], b=x['b'])");
    }
    return string();
  }

  bool boolean() {
    peek();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(position_, word.size()) == word) {
        position_ += word.size();
        return value;
      }
    }
    fail("True or False expected");
  }

  Ints tuple() {
    Ints out;
    expect('(');
    bool comma = true;
    while (!accept(')')) {
      if (!comma) fail("',' or ')' expected");
      if (out.size() == kMaxRank) fail(cat("more than ", kMaxRank, " dimensions"));
      out.push_back(integer());
      comma = accept(',');
    }
    if (out.size() == 1 && !comma) fail("the shape is no tuple");
    return out;
  }

  std::int64_t integer() {
    if (peek() == '-') fail("a dimension is negative");
    std::int64_t value = 0;
    const char* begin = text_.data() + position_;
    const auto [end, status] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (status != std::errc()) fail(end == begin ? "a dimension is no number" : "a dimension is too large");
    position_ += static_cast<std::size_t>(end - begin);
    if (peek() == 'L') ++position_;  // as Python 2 wrote it
    return value;
  }

  void set_dtype(NpyHeader& out) const {
    const std::string_view text = *descr_;
    if (text.size() > 1 && std::string_view("<>|").find(text[0]) != std::string_view::npos) {
      for (const Code& c : kCodes) {
        if (text.substr(1) != c.code) continue;
        out.dtype = c.dtype;
        const bool single = dtype_size(c.dtype) == 1;
        if (!single && text[0] == '|') break;
        out.swapped = !single && text[0] == '>';
        return;
      }
    }
    refuse_dtype(*descr_, place_);
  }

  std::string_view text_;
  const std::string& place_;
  std::size_t position_ = 0;
  std::optional<std::string> descr_;
  std::optional<bool> fortran_;
  std::optional<Ints> shape_;
};

/// dst[row-major] = src[column-major]
template <class T>
void turn_round(const std::byte* src, std::byte* dst, const Ints& shape) {
  const std::size_t rank = shape.size();
  Ints stride(rank, 1), index(rank, 0);
  for (std::size_t d = 1; d < rank; ++d) stride[d] = stride[d - 1] * shape[d - 1];
  const std::int64_t count = numel(shape);
  std::int64_t from = 0;
  for (std::int64_t to = 0; to < count; ++to) {
    std::memcpy(dst + static_cast<std::size_t>(to) * sizeof(T),
                src + static_cast<std::size_t>(from) * sizeof(T), sizeof(T));
    for (std::size_t d = rank; d-- > 0;) {
      from += stride[d];
      if (++index[d] < shape[d]) break;
      from -= stride[d] * shape[d];
      index[d] = 0;
    }
  }
}

Bytes row_major(const NpyHeader& header, const Bytes& elements, const std::string& place) {
  const auto source = allocate_bytes(elements.size, place);
  const auto target = allocate_bytes(elements.size, place);
  elements.read(0, source.get(), elements.size);
  switch (dtype_size(header.dtype)) {
    case 1: turn_round<std::uint8_t>(source.get(), target.get(), header.shape); break;
    case 2: turn_round<std::uint16_t>(source.get(), target.get(), header.shape); break;
    case 4: turn_round<std::uint32_t>(source.get(), target.get(), header.shape); break;
    default: turn_round<std::uint64_t>(source.get(), target.get(), header.shape); break;
  }
  return {nullptr, target, 0, elements.size};
}

}  // namespace

NpyHeader read_npy_header(const PullBytes& pull, std::uint64_t total, const std::string& place) {
  const auto require = [&](std::uint64_t bytes) {
    if (bytes > total)
      throw Error(cat("the .npy file is truncated: ", total, " bytes")).in(place).hint("copy it again");
  };
  std::byte start[12];
  require(10);
  pull(start, 10);
  if (std::memcmp(start, kMagic.data(), kMagic.size()) != 0) {
    throw Error("this is no .npy file: its first bytes are not \\x93NUMPY").in(place);
  }
  const int version = std::to_integer<int>(start[6]);
  if (version < 1 || version > 3)
    throw Error(cat(".npy version ", version, " is unknown; 1 to 3 are read")).in(place);
  std::uint64_t prefix = 10,
                length = std::to_integer<unsigned>(start[8]) + 256 * std::to_integer<unsigned>(start[9]);
  if (version > 1) {
    require(prefix = 12);
    pull(start + 10, 2);
    length +=
        (std::to_integer<std::uint64_t>(start[10]) << 16) + (std::to_integer<std::uint64_t>(start[11]) << 24);
  }
  if (length > kMaxHeader)
    throw Error(cat("the .npy header claims ", length, " bytes; at most ", kMaxHeader, " are read"))
        .in(place);
  require(prefix + length);
  std::string text(length, '\0');
  pull(reinterpret_cast<std::byte*>(text.data()), text.size());

  NpyHeader out = HeaderText(text, place).parse();
  out.header_bytes = prefix + length;
  out.data_bytes = dtype_size(out.dtype);
  const auto zero = std::find(out.shape.begin(), out.shape.end(), 0);
  for (const std::int64_t dim : out.shape) {  // without the zeros: their product must not hide an overflow
    if (dim != 0)
      out.data_bytes =
          mul_checked(out.data_bytes, static_cast<std::uint64_t>(dim), "the array's shape", place);
  }
  if (zero != out.shape.end()) out.data_bytes = 0;
  if (out.data_bytes != total - out.header_bytes) {
    throw Error(cat("the .npy file is ", out.data_bytes > total - out.header_bytes ? "truncated" : "too long",
                    ": its header asks for ", out.data_bytes, " bytes of elements, ",
                    total - out.header_bytes, " are there"))
        .at(cat("shape ", shape_str(out.shape), " of ", dtype_name(out.dtype)))
        .in(place)
        .hint("copy the file again");
  }
  return out;
}

Array npy_array(const NpyHeader& header, std::string name, Bytes elements, const std::string& place) {
  if (header.shape.empty()) {
    throw Error(cat("array ", in_quotes(name), " is a single number: it has no sample axis"))
        .in(place)
        .hint("leave it out of the file; every array needs one row per sample");
  }
  Array out;
  out.info = {std::move(name), header.dtype, Ints(header.shape.begin() + 1, header.shape.end())};
  out.rows = header.shape.front();
  out.swapped = header.swapped;
  out.place = place;
  const auto wide =
      std::count_if(header.shape.begin(), header.shape.end(), [](std::int64_t d) { return d != 1; });
  const bool turn = header.fortran && wide > 1 && elements.size > 0;
  out.bytes = turn ? row_major(header, elements, place) : std::move(elements);
  return out;
}

std::string npy_header_text(DType dtype, const Ints& shape) {
  const auto code =
      std::find_if(std::begin(kCodes), std::end(kCodes), [&](const Code& c) { return c.dtype == dtype; });
  if (code == std::end(kCodes)) {
    throw Error(cat("NumPy has no type for ", dtype_name(dtype))).hint("convert to float32 first");
  }
  std::string dims;
  for (const std::int64_t d : shape) dims += cat(d, shape.size() == 1 ? "," : ", ");
  if (shape.size() > 1) dims.resize(dims.size() - 2);
  std::string dict = cat("{'descr': '", dtype_size(dtype) == 1 ? '|' : '<', code->code,
                         "', 'fortran_order': False, 'shape': (", dims, "), }");
  constexpr std::size_t kPrefix = 10, kAlign = 64;
  dict.append(kAlign - 1 - (kPrefix + dict.size()) % kAlign, ' ');
  dict += '\n';
  std::string out(kMagic);
  out += {'\x01', '\x00', static_cast<char>(dict.size() & 0xff), static_cast<char>(dict.size() >> 8)};
  return out + dict;
}

std::unique_ptr<Dataset> open_npy(const std::filesystem::path& path) {
  const auto file = std::make_shared<const File>(path);
  std::uint64_t position = 0;
  const PullBytes pull = [&](std::byte* out, std::size_t count) {
    file->read(position, out, count);
    position += count;
  };
  const NpyHeader header = read_npy_header(pull, file->size(), file->name());
  std::vector<Array> arrays;
  arrays.push_back(npy_array(header, path.stem().string(),
                             {file, nullptr, header.header_bytes, header.data_bytes}, file->name()));
  return make_table(std::move(arrays), file->name());
}

}  // namespace onnxddp

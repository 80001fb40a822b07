// The table of formats, opening by extension, and collate.
#include "importer/dataset.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <limits>

#include "importer/data/npy.h"
#include "importer/data/npz.h"
#include "importer/data/table.h"

namespace onnxddp {
namespace {

std::string known_formats() {
  std::string out;
  for (const DatasetDef& f : dataset_formats()) {
    out += cat(out.empty() ? "" : ", ", f.name, " (");
    for (const std::string& e : f.extensions) out += e + (e == f.extensions.back() ? ")" : " ");
  }
  return out;
}

std::unique_ptr<Dataset> open_file(const std::filesystem::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  for (const DatasetDef& f : dataset_formats()) {
    if (std::find(f.extensions.begin(), f.extensions.end(), extension) != f.extensions.end())
      return f.open(file);
  }
  throw Error(cat("the data format of ", file.string(), " is unknown: ",
                  extension.empty() ? "its name has no extension" : cat("extension ", in_quotes(extension))))
      .in(file.string())
      .hint("formats: " + known_formats());
}

/// True if one shape is the other with one dimension of 1 put in.
bool differ_by_one_dim(const Ints& a, const Ints& b) {
  if (a.size() > b.size()) return differ_by_one_dim(b, a);
  if (a.size() + 1 != b.size()) return false;
  for (std::size_t i = 0; i < b.size(); ++i) {
    Ints rest = b;
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(i));
    if (b[i] == 1 && rest == a) return true;
  }
  return false;
}

struct Range {
  std::int64_t low = std::numeric_limits<std::int64_t>::min(),
               high = std::numeric_limits<std::int64_t>::max();
};

/// Values of an integer or bool type that a 64-bit integer can hold.
Range range_of(DType dtype) {
  switch (dtype) {
    case DType::boolean: return {0, 1};
    case DType::i8: return {-128, 127};
    case DType::i16: return {-32768, 32767};
    case DType::i32: return {-2147483648LL, 2147483647};
    case DType::u8: return {0, 255};
    case DType::u16: return {0, 65535};
    case DType::u32: return {0, 4294967295LL};
    case DType::u64: return {0, std::numeric_limits<std::int64_t>::max()};
    default: return {};
  }
}

/// Index of the first element that its type after conversion cannot hold, or -1.
std::int64_t first_misfit(const HostTensor& from, const HostTensor& to) {
  if (is_float(to.dtype())) {
    if (to.dtype() == DType::f64 || !is_float(from.dtype())) return -1;  // integers stay finite, if rounded
    for (std::int64_t i = 0, n = to.numel(); i < n; ++i) {
      if (!(std::abs(to.as_double(i)) <= std::numeric_limits<double>::max())) return i;
    }
    return -1;
  }
  const Range have = range_of(from.dtype()), want = range_of(to.dtype());
  const bool large = from.dtype() == DType::u64 && to.dtype() != DType::u64;  // may exceed 63 bits
  if (!large && want.low <= have.low && have.high <= want.high) return -1;
  for (std::int64_t i = 0, n = from.numel(); i < n; ++i) {
    const std::int64_t value = from.as_int(i);
    const bool wrapped = from.dtype() == DType::u64 && value < 0;
    if (wrapped || value < want.low || value > want.high) return i;
  }
  return -1;
}

template <class From>
HostTensor to_float(const HostTensor& from) {
  HostTensor to(DType::f32, from.shape());
  auto* out = to.mutable_data<float>();
  for (std::int64_t i = 0, n = from.numel(); i < n; ++i) {
    From value;
    std::memcpy(&value, from.raw() + static_cast<std::size_t>(i) * sizeof value, sizeof value);
    out[i] = static_cast<float>(value);
  }
  return to;
}

/// cast(), with loops of their own for what feeds most models: images and tables for a float input.
HostTensor fast_cast(const HostTensor& from, DType to) {
  if (to == DType::f32) {
    switch (from.dtype()) {
      case DType::u8: return to_float<std::uint8_t>(from);
      case DType::i32: return to_float<std::int32_t>(from);
      case DType::i64: return to_float<std::int64_t>(from);
      case DType::f64: return to_float<double>(from);
      default: break;
    }
  }
  return from.cast(to);
}

HostTensor convert(const HostTensor& from, const ArrayInfo& info, const Column& column,
                   std::span<const std::int64_t> indices) {
  if (from.dtype() == column.dtype) return from;
  HostTensor to = fast_cast(from, column.dtype);
  const std::int64_t bad = first_misfit(from, to);
  if (bad < 0) return to;
  const std::int64_t row =
      indices[static_cast<std::size_t>(bad / (from.numel() / static_cast<std::int64_t>(indices.size())))];
  throw Error(cat("a value of array ", in_quotes(info.name), " does not fit ", dtype_name(column.dtype),
                  ": row ", row))
      .at(cat(in_quotes(info.name), ": ", dtype_name(info.dtype), shape_str(info.row_shape), " a row, value ",
              is_float(from.dtype()) ? number_str(from.as_double(bad)) : cat(from.as_int(bad))))
      .hint(cat("input ", in_quotes(column.input), " is ", dtype_name(column.dtype)));
}

}  // namespace

const std::vector<DatasetDef>& dataset_formats() {
  static const std::vector<DatasetDef> formats = {{"npz", {".npz"}, open_npz}, {"npy", {".npy"}, open_npy}};
  return formats;
}

std::unique_ptr<Dataset> open_dataset(const std::vector<std::filesystem::path>& files) {
  if (files.empty()) throw Error("no data file is given").hint("--data FILE; formats: " + known_formats());
  std::vector<std::unique_ptr<Dataset>> parts;
  for (const auto& file : files) parts.push_back(open_file(file));
  return join(std::move(parts));
}

std::string conversion(const ArrayInfo& info, const Column& column) {
  const auto report = [&](const std::string& what) {
    return Error(cat(what, ": array ", in_quotes(info.name), ", input ", in_quotes(column.input)))
        .at(cat(in_quotes(info.name), ": ", dtype_name(info.dtype), shape_str(info.row_shape),
                " a row, wanted: ", dtype_name(column.dtype), shape_str(column.row_shape)));
  };
  if (info.row_shape != column.row_shape && !differ_by_one_dim(info.row_shape, column.row_shape)) {
    throw report("the data's shape does not fit the model");
  }
  if (is_float(info.dtype) && !is_float(column.dtype)) {
    throw report(cat("the data is ", dtype_name(info.dtype), ", the model wants ", dtype_name(column.dtype)))
        .hint("floats are not rounded for you: x.astype(numpy.int64) if they are whole numbers");
  }
  std::string out;
  if (info.dtype != column.dtype)
    out = cat(dtype_name(info.dtype), " converted to ", dtype_name(column.dtype));
  if (info.row_shape != column.row_shape) {
    out += cat(out.empty() ? "" : ", ", "each row of shape ", shape_str(info.row_shape), " is read as ",
               shape_str(column.row_shape));
  }
  return out;
}

std::vector<HostTensor> collate(const Dataset& data, const std::vector<Column>& columns,
                                std::span<const std::int64_t> indices) {
  std::vector<HostTensor> out;
  for (const Column& c : columns) {
    CHECK(c.array < data.arrays().size());
    const ArrayInfo& info = data.arrays()[c.array];
    conversion(info, c);  // throws where it is impossible
    Ints shape = c.row_shape;
    shape.insert(shape.begin(), static_cast<std::int64_t>(indices.size()));
    out.push_back(convert(data.read(c.array, indices), info, c, indices).reshaped(std::move(shape)));
  }
  return out;
}

}  // namespace onnxddp

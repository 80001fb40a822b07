#include "executor/train/data.h"

#include <algorithm>
#include <numeric>

#include "graph/nearest.h"

namespace onnxddp {
namespace {

constexpr std::int64_t kScan = 16 << 20;  // elements of a target that are looked at before the first step
constexpr std::size_t kCacheBytes = 64U << 20;  // data up to so much is kept in memory

std::string array_list(const Dataset& data) {
  std::string out;
  for (const ArrayInfo& info : data.arrays())
    out += cat(out.empty() ? "" : ", ", info.name, " ", dtype_name(info.dtype), shape_str(info.row_shape));
  return out;
}

std::vector<std::string> array_names(const Dataset& data) {
  std::vector<std::string> out;
  for (const ArrayInfo& info : data.arrays()) out.push_back(info.name);
  return out;
}

std::optional<std::size_t> find_array(const Dataset& data, const std::string& name) {
  for (std::size_t i = 0; i < data.arrays().size(); ++i)
    if (data.arrays()[i].name == name) return i;
  return std::nullopt;
}

/// The row shape that the input wants: its dimensions behind the batch, symbols from the data.
Ints wanted_rows(const Value& input, const ArrayInfo& info, DimBindings& dims) {
  const Shape rows(input.type.shape.begin() + 1, input.type.shape.end());
  if (rows.size() == info.row_shape.size()) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::set<std::string> symbols = rows[i].symbols();
      if (symbols.size() == 1 && rows[i] == Dim::symbol(*symbols.begin()))
        dims.emplace(*symbols.begin(), info.row_shape[i]);
    }
  }
  const Shape bound = bind_shape(rows, dims);
  if (is_static(bound)) return static_shape(bound);
  throw Error(cat("the data does not say how large ", shape_str(bound), " of input '", input.name, "' is"))
      .at(cat(input.name, ": ", input.type, ", array: ", dtype_name(info.dtype), shape_str(info.row_shape),
              " a row"))
      .hint("--dim NAME=VALUE sets a dimension");
}

Column match_input(const Value& input, const Dataset& data, const std::string& where, DimBindings& dims) {
  const std::optional<std::size_t> array = find_array(data, input.name);
  if (!array)
    throw Error(cat("no array for input '", input.name, "'", did_you_mean(input.name, array_names(data))))
        .at(cat(input.name, ": ", input.type))
        .in(where)
        .hint(cat("arrays are matched by name; there are: ", array_list(data)));
  if (input.type.shape.empty())
    throw Error(cat("input '", input.name, "' has no batch dimension, so rows of data cannot feed it"))
        .at(cat(input.name, ": ", input.type))
        .hint(cat("--input ", input.name, "=VALUE fixes it"));
  Column column{*array, input.name, input.type.dtype, {}};
  column.row_shape = wanted_rows(input, data.arrays()[*array], dims);
  try {
    conversion(data.arrays()[*array], column);
  } catch (Error& error) {
    error.add_in(where);
    throw;
  }
  return column;
}

Ints without_ones(const Ints& shape) {
  Ints out;
  std::copy_if(shape.begin(), shape.end(), std::back_inserter(out), [](std::int64_t d) { return d != 1; });
  return out;
}

/// Calls `visit(values, first row)` with the first rows of an array, in pieces.
template <class Visit>
void scan_rows(const Dataset& data, std::size_t array, Visit&& visit) {
  const std::int64_t per_row = std::max<std::int64_t>(1, numel(data.arrays()[array].row_shape));
  const std::int64_t rows = std::min(data.size(), std::max<std::int64_t>(1, kScan / per_row));
  const std::int64_t piece = std::max<std::int64_t>(1, 65536 / per_row);
  std::vector<std::int64_t> indices;
  for (std::int64_t begin = 0; begin < rows; begin += piece) {
    indices.resize(static_cast<std::size_t>(std::min(piece, rows - begin)));
    std::iota(indices.begin(), indices.end(), begin);
    visit(data.read(array, indices), begin);
  }
}

}  // namespace

std::vector<std::filesystem::path> data_files(const std::vector<std::string>& given,
                                              const std::filesystem::path& model) {
  if (!given.empty()) return {given.begin(), given.end()};
  std::filesystem::path neighbour = model;
  neighbour.replace_extension(".npz");
  std::error_code error;
  if (std::filesystem::exists(neighbour, error)) return {neighbour};
  throw usage_error(cat("no data: --data is not given, and there is no ", neighbour.string()))
      .hint("--data FILE.npz, with one array for each input and one for the target");
}

std::string file_list(const std::vector<std::filesystem::path>& files) {
  std::string out;
  for (std::size_t i = 0; i < files.size(); ++i)
    out += cat(i == 0 ? "" : i + 1 == files.size() ? " and " : ", ", files[i].string());
  return out;
}

ArrayMatch match_arrays(const Graph& graph, const Dataset& data, const std::string& target, bool needs_target,
                        const std::string& where) {
  ArrayMatch match;
  std::vector<bool> used(data.arrays().size());
  for (const ValueId id : graph.inputs) {
    match.inputs.push_back(match_input(graph.value(id), data, where, match.dims));
    used[match.inputs.back().array] = true;
  }
  for (std::size_t i = 0; i < used.size(); ++i)
    if (!used[i]) match.extra.push_back(i);
  if (!target.empty()) {
    match.target = find_array(data, target);
    if (!match.target)
      throw usage_error(
          cat("--target: there is no array '", target, "'", did_you_mean(target, array_names(data))))
          .in(where)
          .hint("arrays: " + array_list(data));
  } else if (match.extra.size() == 1) {
    match.target = match.extra[0];
  } else if (needs_target && match.extra.empty()) {
    throw Error("no array is left for the target: all of them are inputs")
        .in(where)
        .hint(cat("arrays: ", array_list(data),
                  "; --target NAME, or --loss graph if the model computes its loss"));
  } else if (needs_target) {
    std::string names;
    for (const std::size_t i : match.extra) names += (names.empty() ? "" : ", ") + data.arrays()[i].name;
    throw usage_error(cat("which array is the target? These are no inputs: ", names))
        .in(where)
        .hint("choose with --target NAME");
  }
  if (match.target) std::erase(match.extra, *match.target);
  return match;
}

TargetScan scan_target(const Dataset& data, std::size_t array) {
  const ArrayInfo& info = data.arrays()[array];
  const bool floats = is_float(info.dtype);
  TargetScan scan;
  scan.binary = floats;
  scan.one_hot = floats && numel(info.row_shape) > 1;
  bool first = true;
  scan_rows(data, array, [&](const HostTensor& values, std::int64_t begin) {
    const std::int64_t per_row = values.numel() / std::max<std::int64_t>(1, values.shape()[0]);
    double row_sum = 0;
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      const std::int64_t row = begin + i / per_row;
      if (floats) {
        if (!scan.binary) return;
        const double value = values.as_double(i);
        row_sum += value;
        if (value != 0 && value != 1) scan.binary = scan.one_hot = false;
        if ((i + 1) % per_row != 0) continue;
        if (row_sum != 1) scan.one_hot = false;
        row_sum = 0;
        continue;
      }
      const std::int64_t value = values.as_int(i);
      if (first || value < scan.least) scan.least = value, scan.least_row = row;
      if (first || value > scan.greatest) scan.greatest = value, scan.greatest_row = row;
      first = false;
    }
  });
  return scan;
}

void check_labels(const Dataset& data, std::size_t array, std::int64_t classes,
                  std::optional<std::int64_t> ignore, const std::string& where) {
  const std::string& name = data.arrays()[array].name;
  scan_rows(data, array, [&](const HostTensor& values, std::int64_t begin) {
    const std::int64_t per_row = values.numel() / std::max<std::int64_t>(1, values.shape()[0]);
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      const std::int64_t label = values.as_int(i);
      if ((label >= 0 && label < classes) || (ignore && label == *ignore)) continue;
      throw Error(cat("label out of range: array '", name, "', row ", begin + i / per_row, " has ", label,
                      ", but the model has ", classes, " classes"))
          .at(cat("classes count from 0: 0..", classes - 1))
          .in(where)
          .hint("correct the labels, or leave some out with --loss cross_entropy:ignore_index=N");
    }
  });
}

std::int64_t find_class_axis(const Shape& output, const Ints& rows, const OptionMap& options,
                             const DimBindings& dims) {
  const auto rank = static_cast<std::int64_t>(output.size());
  const auto fits = [&](std::int64_t axis) {
    if (axis < 1 || axis >= rank) return false;
    Shape rest = bind_shape(output, dims);
    rest.erase(rest.begin() + axis);
    rest.erase(rest.begin());
    return is_static(rest) && without_ones(static_shape(rest)) == without_ones(rows);
  };
  if (const auto axis = options.find("axis"); axis != options.end()) {
    const std::int64_t number = std::strtoll(axis->second.c_str(), nullptr, 10);
    return fits(number < 0 ? number + rank : number) ? (number < 0 ? number + rank : number) : -1;
  }
  return fits(1) ? 1 : fits(rank - 1) ? rank - 1 : -1;
}

Column target_column(const ArrayInfo& info, std::size_t array, const std::string& loss,
                     const OptionMap& options, const TensorType& output, const DimBindings& dims) {
  Column column{array, "target", info.dtype, info.row_shape};
  if (output.shape.empty()) return column;
  Shape rows = bind_shape(output.shape, dims);
  if (loss == "cross_entropy" || loss == "nll") {
    column.dtype = DType::i64;
    const std::int64_t axis = find_class_axis(output.shape, info.row_shape, options, dims);
    if (axis < 0) return column;
    rows.erase(rows.begin() + axis);
  } else {
    column.dtype = output.dtype;
  }
  rows.erase(rows.begin());
  if (is_static(rows) && without_ones(static_shape(rows)) == without_ones(info.row_shape))
    column.row_shape = static_shape(rows);
  return column;
}

BatchSource::BatchSource(std::shared_ptr<const Dataset> data, std::vector<Column> columns,
                         std::vector<std::int64_t> rows)
    : data_(std::move(data)), columns_(std::move(columns)), rows_(std::move(rows)) {
  if (row_bytes() * static_cast<std::size_t>(size()) > kCacheBytes) return;
  std::vector<std::int64_t> all = rows_;
  if (all.empty()) {
    all.resize(static_cast<std::size_t>(data_->size()));
    std::iota(all.begin(), all.end(), std::int64_t{0});
  }
  cache_ = collate(*data_, columns_, all);
}

std::int64_t BatchSource::size() const {
  return rows_.empty() ? data_->size() : static_cast<std::int64_t>(rows_.size());
}

std::size_t BatchSource::row_bytes() const {
  std::size_t bytes = 0;
  for (const Column& column : columns_)
    bytes += static_cast<std::size_t>(numel(column.row_shape)) * dtype_size(column.dtype);
  return bytes;
}

Feeds BatchSource::batch(std::span<const std::int64_t> positions) const {
  Feeds feeds;
  if (!cached()) {
    std::vector<std::int64_t> indices(positions.begin(), positions.end());
    if (!rows_.empty())
      for (std::int64_t& index : indices) index = rows_[static_cast<std::size_t>(index)];
    std::vector<HostTensor> tensors = collate(*data_, columns_, indices);
    for (std::size_t i = 0; i < columns_.size(); ++i) feeds.emplace(columns_[i].input, std::move(tensors[i]));
    return feeds;
  }
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    Ints shape = columns_[i].row_shape;
    shape.insert(shape.begin(), static_cast<std::int64_t>(positions.size()));
    HostTensor out(columns_[i].dtype, std::move(shape));
    const std::size_t bytes =
        static_cast<std::size_t>(numel(columns_[i].row_shape)) * dtype_size(columns_[i].dtype);
    std::byte* to = out.mutable_raw();
    for (std::size_t k = 0; k < positions.size(); ++k)
      std::memcpy(to + k * bytes, cache_[i].raw() + static_cast<std::size_t>(positions[k]) * bytes, bytes);
    feeds.emplace(columns_[i].input, std::move(out));
  }
  return feeds;
}

}  // namespace onnxddp

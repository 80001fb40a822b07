// Data sets: named arrays with one row per sample, read on demand.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/tensor.h"

namespace ONNXDDP_API onnxddp {

struct ArrayInfo {
  std::string name;
  DType dtype;
  Ints row_shape;  // shape without the sample axis
};

/// Rows of named arrays. Thread-compatible; `read` may be called from one prefetch thread.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t size() const = 0;
  virtual const std::vector<ArrayInfo>& arrays() const = 0;
  /// Rows `indices` of array `array`, stacked: shape [indices.size(), row_shape…]. Throws Error on a read
  /// failure or a NaN/infinity (naming file, array and row) in float data.
  virtual HostTensor read(std::size_t array, std::span<const std::int64_t> indices) const = 0;
  /// Hex fingerprint: sizes, shapes, dtypes, XXH3 of headers and 64 sampled blocks; no paths or times.
  virtual std::string fingerprint() const = 0;
};

/// One format: name, file extensions, how to open. Adding a format: one file in data/ and a line in the
/// table.
struct DatasetDef {
  std::string name;
  std::vector<std::string> extensions;
  std::unique_ptr<Dataset> (*open)(const std::filesystem::path& file);
};
const std::vector<DatasetDef>& dataset_formats();

/// Opens one or several files (their arrays are joined by name; equal row counts required; .npy arrays are
/// named by the file's stem; column-major ones are turned round). Throws Error: unknown extension, no rows,
/// object or string arrays, truncated files, compression bombs, duplicate names.
std::unique_ptr<Dataset> open_dataset(const std::vector<std::filesystem::path>& files);

/// One batch under construction: `stack` collate with conversion to the wanted type. Float64 and integer
/// arrays for a float input are converted (not scaled); float for an integer input throws Error; rows that
/// differ from the wanted ones by one dimension of 1 are reshaped, never broadcast (design A1 data
/// conversion).
struct Column {
  std::size_t array;  // index into arrays()
  std::string input;  // name of the graph input it feeds
  DType dtype;        // wanted
  Ints row_shape;     // wanted (same number of elements)
};
/// What collate does to an array for a column, for the banner: "f64 converted to f32", or nothing. Throws
/// Error where it cannot be done (shape, float for an integer input), so that this is known before the first
/// step.
std::string conversion(const ArrayInfo& info, const Column& column);
/// Rows `indices` of each column, in its wanted type and shape. Throws Error as conversion, Dataset::read,
/// and for a value that the wanted type cannot hold (naming array and row).
std::vector<HostTensor> collate(const Dataset& data, const std::vector<Column>& columns,
                                std::span<const std::int64_t> indices);

/// Writes arrays as .npz (stored, deterministic bytes: fixed time stamps).
void write_npz(const std::filesystem::path& file,
               const std::vector<std::pair<std::string, HostTensor>>& arrays);

}  // namespace onnxddp

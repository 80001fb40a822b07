// Arrays with one row per sample, wherever their bytes lie: what every data format is turned into.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "importer/data/bytes.h"
#include "importer/dataset.h"

namespace onnxddp {

/// Dense row-major rows.
struct Array {
  ArrayInfo info;
  std::int64_t rows = 0;
  Bytes bytes;           // rows * numel(row_shape) elements
  bool swapped = false;  // big-endian elements
  std::string place;     // for messages: file, and array where the file has several
};

/// The arrays of one file as a data set. Throws Error: no arrays, no rows, unequal numbers of rows, equal
/// names.
std::unique_ptr<Dataset> make_table(std::vector<Array> arrays, const std::string& file);
/// The arrays of several data sets side by side; the same checks.
std::unique_ptr<Dataset> join(std::vector<std::unique_ptr<Dataset>> parts);

/// 32 hex digits of XXH3-128.
std::string xxh3_hex(std::string_view text);

}  // namespace onnxddp

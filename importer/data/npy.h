// The .npy format, versions 1 to 3: magic, version, length, a Python dict literal, then the elements.
#pragma once

#include <functional>
#include <string>

#include "importer/data/table.h"

namespace onnxddp {

struct NpyHeader {
  DType dtype = DType::f32;
  bool swapped = false;  // big-endian
  bool fortran = false;  // column-major
  Ints shape;
  std::uint64_t header_bytes = 0;
  std::uint64_t data_bytes = 0;
};

/// Gives the next bytes of the file; throws Error at its end.
using PullBytes = std::function<void(std::byte* out, std::size_t count)>;

/// Reads and checks a header of a file of `total` bytes: dtype, order, and that header and elements fill the
/// file exactly. Throws Error in `place`, with a remedy where NumPy can help. Allocates at most 1 MiB.
NpyHeader read_npy_header(const PullBytes& pull, std::uint64_t total, const std::string& place);

/// `elements` lie behind the header: an array of row-major rows. Column-major ones are read whole and turned
/// round.
Array npy_array(const NpyHeader& header, std::string name, Bytes elements, const std::string& place);

/// Version 1.0 header, padded to 64 bytes as NumPy does. Throws Error for bf16, which NumPy lacks.
std::string npy_header_text(DType dtype, const Ints& shape);

std::unique_ptr<Dataset> open_npy(const std::filesystem::path& file);

}  // namespace onnxddp

// The part of the zip format that .npz files use: the central directory (with zip64), stored and deflated
// members.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "importer/data/bytes.h"

namespace onnxddp {

struct ZipMember {
  std::string name;
  bool deflated = false;
  std::uint32_t crc = 0;
  std::uint64_t stored_bytes = 0;  // in the archive
  std::uint64_t bytes = 0;         // unpacked
  std::uint64_t header_offset = 0;
  std::uint64_t data_offset = 0;
};

/// The members in the order of the directory. Throws Error: no directory (truncated, no zip), records outside
/// the file, members that overlap, encryption, other methods than stored and deflate, more than 65,536
/// members.
std::vector<ZipMember> read_zip_directory(const File& file);

/// Unpacks one deflated member from front to back.
class Inflater {
 public:
  /// `file` must outlive it.
  Inflater(const File& file, const ZipMember& member, std::string place);
  ~Inflater();
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  /// The next `count` bytes; throws Error if the stream is damaged or ends before.
  void read(std::byte* out, std::size_t count);
  /// Throws Error unless the stream ends here and its checksum holds.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace onnxddp

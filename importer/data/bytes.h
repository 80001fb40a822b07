// Bytes of data files: files read by pread, slices of them, and a checked reader for binary formats. Data
// files are untrusted: every offset and length goes through a check here, nothing is mapped (a mapped file
// that shrinks kills).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "graph/error.h"

namespace onnxddp {

static_assert(std::endian::native == std::endian::little, "binary formats are read as little-endian");

/// The text in quotes, control characters as \xNN: names from a file must not steer a terminal.
std::string in_quotes(std::string_view name);
/// "1.2 MiB"
std::string size_str(std::uint64_t bytes);
/// a*b, a+b; throws Error(`what` is too large) in `place` on overflow.
std::uint64_t mul_checked(std::uint64_t a, std::uint64_t b, std::string_view what, const std::string& place);
std::uint64_t add_checked(std::uint64_t a, std::uint64_t b, std::string_view what, const std::string& place);

/// A regular file open for reading. Safe for several threads.
class File {
 public:
  /// Throws Error if it cannot be opened or is no regular file.
  explicit File(const std::filesystem::path& path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& name() const { return name_; }
  std::uint64_t size() const { return size_; }
  /// Exactly `count` bytes from `offset`; throws Error on I/O errors and if the file has become shorter.
  void read(std::uint64_t offset, std::byte* out, std::size_t count) const;

 private:
  std::string name_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

/// `size` bytes, in a file from `offset` on or in memory.
struct Bytes {
  std::shared_ptr<const File> file;
  std::shared_ptr<const std::byte[]> memory;  // used if there is no file
  std::uint64_t offset = 0;
  std::uint64_t size = 0;

  void read(std::uint64_t from, std::byte* out, std::size_t count) const;
};

/// Uninitialised memory; bad_alloc becomes an Error that names `what`.
std::shared_ptr<std::byte[]> allocate_bytes(std::uint64_t count, const std::string& what);

/// Reads little-endian numbers and byte runs from a span; throws Error in `place` at its end.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::string place) : bytes_(bytes), place_(std::move(place)) {}

  std::size_t left() const { return bytes_.size() - position_; }
  std::uint16_t u16() { return number<std::uint16_t>(); }
  std::uint32_t u32() { return number<std::uint32_t>(); }
  std::uint64_t u64() { return number<std::uint64_t>(); }
  std::span<const std::byte> take(std::size_t count) {
    if (count > left()) throw Error("the file is damaged: a record ends too early").in(place_);
    position_ += count;
    return bytes_.subspan(position_ - count, count);
  }
  std::string text(std::size_t count) {
    const auto part = take(count);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }

 private:
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
  std::string place_;
};

}  // namespace onnxddp

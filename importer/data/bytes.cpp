#include "importer/data/bytes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <new>

namespace onnxddp {

std::string in_quotes(std::string_view name) {
  return cat("'", printable(name.substr(0, 200)), name.size() > 200 ? "…'" : "'");
}

std::string size_str(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::uint64_t mul_checked(std::uint64_t a, std::uint64_t b, std::string_view what, const std::string& place) {
  std::uint64_t out;
  if (__builtin_mul_overflow(a, b, &out)) throw Error(cat(what, " is too large")).in(place);
  return out;
}

std::uint64_t add_checked(std::uint64_t a, std::uint64_t b, std::string_view what, const std::string& place) {
  std::uint64_t out;
  if (__builtin_add_overflow(a, b, &out)) throw Error(cat(what, " is too large")).in(place);
  return out;
}

File::File(const std::filesystem::path& path) : name_(path.string()) {
  // Non-blocking: opening a pipe that nobody writes must not hang.
  fd_ = ::open(name_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) throw Error(cat("cannot open ", name_, ": ", std::strerror(errno)));
  struct stat info {};
  const bool known = ::fstat(fd_, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    ::close(fd_);
    throw Error(
        cat("cannot read ", name_, ": it is ", S_ISDIR(info.st_mode) ? "a folder" : "no regular file"));
  }
  size_ = static_cast<std::uint64_t>(info.st_size);
}

File::~File() { ::close(fd_); }

void File::read(std::uint64_t offset, std::byte* out, std::size_t count) const {
  constexpr std::size_t kPiece = 1U << 30;  // Linux transfers at most 2 GiB a call
  while (count > 0) {
    const ssize_t got = ::pread(fd_, out, std::min(count, kPiece), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw Error(cat("cannot read ", name_, ": ", std::strerror(errno))).in(cat(name_, ", byte ", offset));
    if (got == 0) {
      throw Error(cat(name_, " ends before byte ", offset + count))
          .in(name_)
          .hint("it was truncated, or changed while it was read: copy it again");
    }
    offset += static_cast<std::uint64_t>(got);
    out += got;
    count -= static_cast<std::size_t>(got);
  }
}

void Bytes::read(std::uint64_t from, std::byte* out, std::size_t count) const {
  CHECK(from <= size && count <= size - from, "read of ", count, " bytes at ", from, " of ", size);
  if (file) {
    file->read(offset + from, out, count);
  } else if (count > 0) {
    std::memcpy(out, memory.get() + offset + from, count);
  }
}

std::shared_ptr<std::byte[]> allocate_bytes(std::uint64_t count, const std::string& what) {
  try {
    return std::shared_ptr<std::byte[]>(new std::byte[count]);
  } catch (const std::bad_alloc&) {
    throw Error(cat("not enough memory: ", what, " needs ", size_str(count)));
  }
}

}  // namespace onnxddp

// Stored members are read row by row from inside the archive; deflated ones are unpacked once when the file
// is opened.
#include "importer/data/npz.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>
#include <utility>

#include "importer/data/npy.h"
#include "importer/data/zip.h"

namespace onnxddp {
namespace {

constexpr std::string_view kSuffix = ".npy";
/// Deflate reaches 1000:1 on zeros. Real data stays far below; a file that asks for more memory than this is
/// refused.
constexpr std::uint64_t kUnpackedFree = 64ULL << 20, kUnpackedRatio = 100;

void check_unpacked_size(const File& file, const std::vector<ZipMember>& members) {
  std::uint64_t total = 0;
  for (const ZipMember& m : members) {
    if (m.deflated) total = add_checked(total, m.bytes, "the unpacked size", file.name());
  }
  if (total > kUnpackedFree && (total - kUnpackedFree) / kUnpackedRatio > file.size()) {
    throw Error(
        cat("the archive of ", size_str(file.size()), " would unpack to ", size_str(total), " in memory"))
        .in(file.name())
        .hint(cat("more than ", kUnpackedRatio, " times its size + ", size_str(kUnpackedFree),
                  " is not unpacked; write it with numpy.savez, which does not compress"));
  }
}

Array open_member(const std::shared_ptr<const File>& file, const ZipMember& member) {
  if (member.name.size() <= kSuffix.size() || !member.name.ends_with(kSuffix)) {
    throw Error(cat("member ", in_quotes(member.name), " is no .npy array"))
        .in(file->name())
        .hint("leave it out of the archive");
  }
  std::string name = member.name.substr(0, member.name.size() - kSuffix.size());
  const std::string place = cat(file->name(), ", array ", in_quotes(name));
  if (!member.deflated) {
    std::uint64_t position = 0;
    const PullBytes pull = [&](std::byte* out, std::size_t count) {
      file->read(member.data_offset + position, out, count);
      position += count;
    };
    const NpyHeader header = read_npy_header(pull, member.bytes, place);
    return npy_array(header, std::move(name),
                     {file, nullptr, member.data_offset + header.header_bytes, header.data_bytes}, place);
  }
  Inflater inflater(*file, member, place);
  const NpyHeader header = read_npy_header(
      [&](std::byte* out, std::size_t count) { inflater.read(out, count); }, member.bytes, place);
  const auto memory = allocate_bytes(header.data_bytes, place);
  inflater.read(memory.get(), header.data_bytes);
  inflater.finish();
  return npy_array(header, std::move(name), {nullptr, memory, 0, header.data_bytes}, place);
}

// --- writing

void put(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i, value >>= 8) out += static_cast<char>(value & 0xff);
}

/// A file that appears under its name only when it is whole.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path& path)
      : path_(path.string()), temporary_(cat(path_, ".tmp-", ::getpid())) {
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd_ < 0) fail();
  }
  ~NewFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!done_) ::unlink(temporary_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const char* data, std::size_t count) {
    constexpr std::size_t kPiece = 1U << 30;
    while (count > 0) {
      const ssize_t done = ::write(fd_, data, std::min(count, kPiece));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail();
      data += done;
      count -= static_cast<std::size_t>(done);
      position_ += static_cast<std::uint64_t>(done);
    }
  }
  void write(const std::string& text) { write(text.data(), text.size()); }
  std::uint64_t position() const { return position_; }

  void commit() {
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
    done_ = true;
  }

 private:
  [[noreturn]] void fail() const {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    ::unlink(temporary_.c_str());
    throw Error(cat("cannot write ", path_, ": ", std::strerror(error)));
  }

  std::string path_, temporary_;
  int fd_ = -1;
  std::uint64_t position_ = 0;
  bool done_ = false;
};

struct Written {
  std::string name;
  std::uint32_t crc = 0;
  std::uint64_t bytes = 0, offset = 0;
};

constexpr std::uint64_t kLimit32 = 0xffffffff;

/// What local header and directory entry have in common: version, flags (UTF-8 names), method stored,
/// 1980-01-01, crc, sizes.
void put_common(std::string& out, const Written& w) {
  const std::uint64_t size = std::min(w.bytes, kLimit32);
  put(out, 45, 2);
  put(out, 0x0800, 2);
  put(out, 0, 2);
  put(out, 0, 2);
  put(out, 0x0021, 2);
  put(out, w.crc, 4);
  put(out, size, 4);
  put(out, size, 4);
  put(out, w.name.size(), 2);
}

std::string extra64(std::initializer_list<std::uint64_t> values) {
  std::string out;
  if (values.size() == 0) return out;
  put(out, 1, 2);
  put(out, 8 * values.size(), 2);
  for (const std::uint64_t v : values) put(out, v, 8);
  return out;
}

Written write_member(NewFile& file, const std::string& name, const HostTensor& tensor) {
  if (name.size() > 4000) throw Error(cat("the name ", in_quotes(name), " is too long for an .npz file"));
  const std::string head = npy_header_text(tensor.dtype(), tensor.shape());
  Written w{name + std::string(kSuffix), 0, head.size() + tensor.bytes(), file.position()};
  auto crc = ::crc32_z(0, reinterpret_cast<const Bytef*>(head.data()), head.size());
  if (tensor.bytes() > 0) crc = ::crc32_z(crc, reinterpret_cast<const Bytef*>(tensor.raw()), tensor.bytes());
  w.crc = static_cast<std::uint32_t>(crc);
  const std::string extra = w.bytes >= kLimit32 ? extra64({w.bytes, w.bytes}) : "";
  std::string local;
  put(local, 0x04034b50, 4);
  put_common(local, w);
  put(local, extra.size(), 2);
  file.write(local + w.name + extra + head);
  file.write(reinterpret_cast<const char*>(tensor.raw()), tensor.bytes());
  return w;
}

std::string directory_entry(const Written& w) {
  const bool large = w.bytes >= kLimit32, far = w.offset >= kLimit32;
  const std::string extra = large && far ? extra64({w.bytes, w.bytes, w.offset})
                            : large      ? extra64({w.bytes, w.bytes})
                            : far        ? extra64({w.offset})
                                         : "";
  std::string out;
  put(out, 0x02014b50, 4);
  put(out, 3 << 8 | 45, 2);  // made on Unix: the permissions below count
  put_common(out, w);
  put(out, extra.size(), 2);
  put(out, 0, 2 + 2 + 2);
  put(out, 0100644ULL << 16, 4);
  put(out, std::min(w.offset, kLimit32), 4);
  return out + w.name + extra;
}

std::string end_records(std::uint64_t members, std::uint64_t offset, std::uint64_t bytes) {
  std::string out;
  if (members >= 0xffff || offset >= kLimit32 || bytes >= kLimit32) {
    put(out, 0x06064b50, 4);
    put(out, 44, 8);
    put(out, 3 << 8 | 45, 2);
    put(out, 45, 2);
    put(out, 0, 4 + 4);
    for (const std::uint64_t v : {members, members, bytes, offset}) put(out, v, 8);
    put(out, 0x07064b50, 4);
    put(out, 0, 4);
    put(out, offset + bytes, 8);
    put(out, 1, 4);
  }
  put(out, 0x06054b50, 4);
  put(out, 0, 2 + 2);
  for (int i = 0; i < 2; ++i) put(out, std::min<std::uint64_t>(members, 0xffff), 2);
  put(out, std::min(bytes, kLimit32), 4);
  put(out, std::min(offset, kLimit32), 4);
  put(out, 0, 2);
  return out;
}

}  // namespace

std::unique_ptr<Dataset> open_npz(const std::filesystem::path& path) {
  const auto file = std::make_shared<const File>(path);
  const std::vector<ZipMember> members = read_zip_directory(*file);
  check_unpacked_size(*file, members);
  std::set<std::string> names;
  for (const ZipMember& m : members) {  // before any is unpacked
    if (!names.insert(m.name).second)
      throw Error(cat("the archive holds two members ", in_quotes(m.name))).in(file->name());
  }
  std::vector<Array> arrays;
  for (const ZipMember& m : members) arrays.push_back(open_member(file, m));
  return make_table(std::move(arrays), file->name());
}

void write_npz(const std::filesystem::path& path,
               const std::vector<std::pair<std::string, HostTensor>>& arrays) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : arrays) {
    if (!names.insert(name).second)
      throw Error(cat("two arrays have the name ", in_quotes(name))).in(path.string());
  }
  NewFile file(path);
  std::string directory;
  for (const auto& [name, tensor] : arrays) directory += directory_entry(write_member(file, name, tensor));
  const std::uint64_t offset = file.position();
  file.write(directory);
  file.write(end_records(arrays.size(), offset, directory.size()));
  file.commit();
}

}  // namespace onnxddp

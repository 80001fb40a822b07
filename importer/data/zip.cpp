// Layout read here, from the end: end record (at most 64 KiB of comment behind it), in zip64 archives a
// locator and a second end record in front of it, the directory, and for each member a local header with its
// bytes. Sizes and checksums come from the directory: a local header may leave them to a record behind the
// bytes.
#include "importer/data/zip.h"

#include <zlib.h>

#include <algorithm>
#include <array>

namespace onnxddp {
namespace {

constexpr std::uint32_t kLocalSignature = 0x04034b50, kEntrySignature = 0x02014b50,
                        kEndSignature = 0x06054b50, kEnd64Signature = 0x06064b50,
                        kLocatorSignature = 0x07064b50;
constexpr std::uint64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kLocalBytes = 30,
                        kEntryBytes = 46;
constexpr std::uint64_t kMaxMembers = 65536, kMaxDirectory = 64ULL << 20;
constexpr std::uint32_t kNone32 = 0xffffffff;
constexpr std::uint16_t kNone16 = 0xffff;

[[noreturn]] void damaged(const File& file, const std::string& why) {
  throw Error(cat("the archive is truncated or damaged: ", why))
      .in(file.name())
      .hint("copy or download it again");
}

std::vector<std::byte> read_part(const File& file, std::uint64_t offset, std::uint64_t count) {
  if (offset > file.size() || count > file.size() - offset) damaged(file, "a record lies behind its end");
  std::vector<std::byte> out(count);
  file.read(offset, out.data(), out.size());
  return out;
}

struct Directory {
  std::uint64_t members = 0, bytes = 0, offset = 0;
};

/// Replaces the numbers by those of the zip64 end record.
void read_end64(const File& file, std::uint64_t end, Directory& out) {
  if (end < kLocatorBytes) damaged(file, "its zip64 locator is missing");
  const auto locator_bytes = read_part(file, end - kLocatorBytes, kLocatorBytes);
  Reader locator(locator_bytes, file.name());
  if (locator.u32() != kLocatorSignature) damaged(file, "its zip64 locator is missing");
  locator.u32();
  const auto record_bytes = read_part(file, locator.u64(), kEnd64Bytes);
  Reader record(record_bytes, file.name());
  if (record.u32() != kEnd64Signature) damaged(file, "its zip64 end record is missing");
  record.take(8 + 2 + 2);
  if (record.u32() != 0 || record.u32() != 0) damaged(file, "it is one of several volumes");
  const std::uint64_t here = record.u64();
  out.members = record.u64();
  if (here != out.members) damaged(file, "it is one of several volumes");
  out.bytes = record.u64();
  out.offset = record.u64();
}

Directory find_directory(const File& file) {
  const std::uint64_t tail_bytes = std::min<std::uint64_t>(file.size(), kEndBytes + kNone16);
  const auto tail = read_part(file, file.size() - tail_bytes, tail_bytes);
  for (std::uint64_t back = kEndBytes; back <= tail_bytes; ++back) {
    Reader record(std::span<const std::byte>(tail.data(), tail.size()).last(back), file.name());
    if (record.u32() != kEndSignature) continue;
    const std::uint16_t disk = record.u16(), start_disk = record.u16(), here = record.u16();
    Directory out;
    out.members = record.u16();
    out.bytes = record.u32();
    out.offset = record.u32();
    if (record.u16() != back - kEndBytes) continue;  // the signature by chance, inside the comment
    const std::uint64_t end = file.size() - back;
    if (out.members == kNone16 || out.bytes == kNone32 || out.offset == kNone32) {
      read_end64(file, end, out);
    } else if (disk != 0 || start_disk != 0 || here != out.members) {
      damaged(file, "it is one of several volumes");
    }
    if (out.offset > end || out.bytes > end - out.offset) damaged(file, "its directory lies behind its end");
    return out;
  }
  throw Error("this is no .npz archive, or a truncated one: the directory at its end is missing")
      .in(file.name())
      .hint("copy or download it again");
}

/// The 64-bit numbers that replace 0xffffffff ones, in this order.
void read_extra64(Reader extra, const File& file, std::initializer_list<std::uint64_t*> fields) {
  while (extra.left() >= 4) {
    const std::uint16_t id = extra.u16(), length = extra.u16();
    Reader body(extra.take(length), file.name());
    if (id != 1) continue;
    for (std::uint64_t* field : fields) {
      if (*field == kNone32) *field = body.u64();
    }
    return;
  }
  for (const std::uint64_t* field : fields) {
    if (*field == kNone32) damaged(file, "a zip64 size is missing");
  }
}

ZipMember read_entry(Reader& directory, const File& file) {
  if (directory.u32() != kEntrySignature) damaged(file, "a directory entry is missing");
  directory.take(2 + 2);
  const std::uint16_t flags = directory.u16(), method = directory.u16();
  directory.take(2 + 2);
  ZipMember out;
  out.crc = directory.u32();
  out.stored_bytes = directory.u32();
  out.bytes = directory.u32();
  const std::uint16_t name = directory.u16(), extra = directory.u16(), comment = directory.u16();
  directory.take(2 + 2 + 4);
  out.header_offset = directory.u32();
  if (name > 4096) throw Error("a member's name is longer than 4096 bytes").in(file.name());
  out.name = directory.text(name);
  read_extra64(Reader(directory.take(extra), file.name()), file,
               {&out.bytes, &out.stored_bytes, &out.header_offset});
  directory.take(comment);
  if ((flags & 1) != 0) throw Error(cat("member ", in_quotes(out.name), " is encrypted")).in(file.name());
  if (method != 0 && method != 8) {
    throw Error(
        cat("member ", in_quotes(out.name), " is packed by method ", method, "; stored and deflate are read"))
        .in(file.name())
        .hint("write it with numpy.savez or numpy.savez_compressed");
  }
  out.deflated = method == 8;
  if (!out.deflated && out.bytes != out.stored_bytes)
    damaged(file, cat("member ", in_quotes(out.name), " has two different sizes"));
  return out;
}

void find_data(const File& file, std::uint64_t limit, ZipMember& member) {
  const auto header_bytes = read_part(file, member.header_offset, kLocalBytes);
  Reader header(header_bytes, file.name());
  if (header.u32() != kLocalSignature)
    damaged(file, cat("the header of member ", in_quotes(member.name), " is missing"));
  header.take(22);
  const std::uint16_t name = header.u16(), extra = header.u16();
  const auto name_bytes = read_part(file, member.header_offset + kLocalBytes, name);
  if (Reader(name_bytes, file.name()).text(name) != member.name) {
    damaged(file, cat("member ", in_quotes(member.name), " has two different names"));
  }
  member.data_offset = member.header_offset + kLocalBytes + name + extra;
  if (member.data_offset > limit || member.stored_bytes > limit - member.data_offset) {
    damaged(file, cat("member ", in_quotes(member.name), " reaches behind its end"));
  }
}

/// Members that share bytes are how a small archive unpacks to an endless one.
void check_overlaps(const File& file, const std::vector<ZipMember>& members) {
  std::vector<const ZipMember*> sorted;
  for (const ZipMember& m : members) sorted.push_back(&m);
  std::sort(sorted.begin(), sorted.end(),
            [](auto* a, auto* b) { return a->header_offset < b->header_offset; });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i]->header_offset < sorted[i - 1]->data_offset + sorted[i - 1]->stored_bytes) {
      damaged(file, cat("members ", in_quotes(sorted[i - 1]->name), " and ", in_quotes(sorted[i]->name),
                        " overlap"));
    }
  }
}

}  // namespace

std::vector<ZipMember> read_zip_directory(const File& file) {
  const Directory where = find_directory(file);
  if (where.members > kMaxMembers || where.bytes > kMaxDirectory) {
    throw Error(cat("the archive holds ", where.members, " members; at most ", kMaxMembers, " are read"))
        .in(file.name());
  }
  if (where.bytes / kEntryBytes < where.members) damaged(file, "its directory is too short");
  const auto bytes = read_part(file, where.offset, where.bytes);
  Reader directory(bytes, file.name());
  std::vector<ZipMember> out;
  for (std::uint64_t i = 0; i < where.members; ++i) {
    out.push_back(read_entry(directory, file));
    find_data(file, where.offset, out.back());
  }
  check_overlaps(file, out);
  return out;
}

struct Inflater::State {
  const File& file;
  const ZipMember& member;
  std::string place;
  z_stream stream{};
  std::array<std::byte, 65536> input{};
  std::uint64_t taken = 0;  // bytes of the member handed to zlib
  std::uint32_t crc = 0;
  bool ended = false;

  [[noreturn]] void fail(const std::string& why) const {
    throw Error("the packed data is damaged: " + why).in(place).hint("copy or download the file again");
  }

  /// Fills `out` as far as the stream goes; returns the number of bytes.
  std::size_t inflate_some(std::byte* out, std::size_t count) {
    stream.next_out = reinterpret_cast<Bytef*>(out);
    stream.avail_out = static_cast<uInt>(count);
    while (stream.avail_out > 0 && !ended) {
      if (stream.avail_in == 0) {
        const std::uint64_t piece = std::min<std::uint64_t>(input.size(), member.stored_bytes - taken);
        if (piece == 0) fail("it ends too early");
        file.read(member.data_offset + taken, input.data(), piece);
        taken += piece;
        stream.next_in = reinterpret_cast<Bytef*>(input.data());
        stream.avail_in = static_cast<uInt>(piece);
      }
      const int status = ::inflate(&stream, Z_NO_FLUSH);
      if (status == Z_STREAM_END) {
        ended = true;
      } else if (status != Z_OK) {
        fail(stream.msg != nullptr ? stream.msg : "zlib refuses it");
      }
    }
    const std::size_t done = count - stream.avail_out;
    crc = static_cast<std::uint32_t>(
        ::crc32(crc, reinterpret_cast<const Bytef*>(out), static_cast<uInt>(done)));
    return done;
  }
};

Inflater::Inflater(const File& file, const ZipMember& member, std::string place)
    : state_(new State{file, member, std::move(place)}) {
  if (::inflateInit2(&state_->stream, -MAX_WBITS) != Z_OK)
    throw Error("not enough memory to unpack").in(state_->place);
}

Inflater::~Inflater() { ::inflateEnd(&state_->stream); }

void Inflater::read(std::byte* out, std::size_t count) {
  constexpr std::size_t kPiece = 1U << 30;  // zlib counts in 32 bits
  while (count > 0) {
    const std::size_t piece = std::min(count, kPiece);
    if (state_->inflate_some(out, piece) != piece) state_->fail("it is shorter than the directory says");
    out += piece;
    count -= piece;
  }
}

void Inflater::finish() {
  std::byte extra;
  if (!state_->ended && state_->inflate_some(&extra, 1) != 0)
    state_->fail("it is longer than the directory says");
  if (state_->crc != state_->member.crc) state_->fail("its checksum does not hold");
}

}  // namespace onnxddp

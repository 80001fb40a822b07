// The safe reader of external data: nothing outside the model's folder is ever opened, and nothing is
// allocated before the file is known to hold it.
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "importer/onnx/proto.h"

namespace onnxddp {

namespace {

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::vector<std::string> components(const std::string& location) {
  if (location.empty()) throw Error("its location is empty");
  if (std::any_of(location.begin(), location.end(),
                  [](char c) { return static_cast<unsigned char>(c) < ' '; }))
    throw Error(cat("its location '", one_line(location, 80), "' holds control characters"));
  if (location[0] == '/') throw Error(cat("its location '", location, "' is an absolute path"));
  if (location.find('\\') != std::string::npos || (location.size() > 1 && location[1] == ':'))
    throw Error(cat("its location '", location, "' is not a relative POSIX path"));
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= location.size()) {
    const std::size_t end = std::min(location.find('/', begin), location.size());
    const std::string part = location.substr(begin, end - begin);
    if (part == "..") throw Error(cat("its location '", location, "' leaves the model's folder"));
    if (!part.empty() && part != ".") parts.push_back(part);
    begin = end + 1;
  }
  if (parts.empty()) throw Error(cat("its location '", location, "' names no file"));
  return parts;
}

/// Opens folder/parts… without following a link anywhere.
Fd open_beneath(int folder, const std::vector<std::string>& parts) {
  std::string path;
  for (const std::string& part : parts) path += (path.empty() ? "" : "/") + part;
  open_how how{};
  how.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  const long fd = ::syscall(SYS_openat2, folder, path.c_str(), &how, sizeof how);
  if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return Fd(static_cast<int>(fd));
  // Older kernels and sandboxes lack openat2: component by component.
  Fd at(::dup(folder));
  for (std::size_t i = 0; i < parts.size() && at.get() >= 0; ++i) {
    const int flags =
        O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (i + 1 < parts.size() ? O_DIRECTORY : 0);
    at = Fd(::openat(at.get(), parts[i].c_str(), flags));
  }
  return at;
}

std::uint64_t parse_count(const std::string& key, const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size())
    throw Error(cat("its ", key, " '", one_line(text, 40), "' is not a number of bytes"));
  return value;
}

struct Place {
  std::string location;
  std::uint64_t offset = 0;
  std::optional<std::uint64_t> length;
};

Place parse_place(const pb::TensorProto& tensor) {
  Place place;
  std::set<std::string> seen;
  for (const pb::StringStringEntryProto& entry : tensor.external_data()) {
    if (!seen.insert(entry.key()).second)
      throw Error(cat("its external data gives '", one_line(entry.key(), 40), "' twice"));
    if (entry.key() == "location") {
      place.location = entry.value();
    } else if (entry.key() == "offset") {
      place.offset = parse_count("offset", entry.value());
    } else if (entry.key() == "length") {
      place.length = parse_count("length", entry.value());
    } else if (entry.key() != "checksum" && entry.key() != "basepath") {
      throw Error(cat("its external data has the unknown key '", one_line(entry.key(), 40), "'"));
    }
  }
  return place;
}

class Reader {
 public:
  explicit Reader(const std::filesystem::path& folder)
      : folder_(folder), fd_(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {}

  void load(pb::TensorProto& tensor) {
    const Place place = parse_place(tensor);
    const std::uint64_t bytes = payload_bytes(tensor);
    if (place.length && *place.length != bytes)
      throw Error(cat("its external data has ", *place.length, " bytes, its type and shape need ", bytes));
    File& file = open(place.location);
    if (place.offset > file.size || bytes > file.size - place.offset)
      throw Error(cat("it ends at byte ", place.offset, "+", bytes, " of '", place.location, "', which has ",
                      file.size));
    // Tied tensors may share bytes, but a small file must not be multiplied without bound.
    file.used += bytes;
    if (file.used > 4 * file.size) throw Error(cat("too many tensors overlap in '", place.location, "'"));
    std::string data(bytes, '\0');
    for (std::uint64_t done = 0; done < bytes;) {
      const ssize_t n =
          ::pread(file.fd.get(), data.data() + done, bytes - done, static_cast<off_t>(place.offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        throw Error(cat("reading '", place.location,
                        "' failed: ", n < 0 ? std::strerror(errno) : "the file became shorter"));
      done += static_cast<std::uint64_t>(n);
    }
    tensor.set_raw_data(std::move(data));
    tensor.clear_external_data();
    tensor.clear_data_location();
  }

 private:
  struct File {
    Fd fd;
    std::uint64_t size, used;
  };

  File& open(const std::string& location) {
    const auto found = files_.find(location);
    if (found != files_.end()) return found->second;
    Fd fd = open_beneath(fd_.get(), components(location));
    if (fd.get() < 0) {
      const int error = errno;
      if (error == ELOOP || error == EXDEV)
        throw Error(cat("'", location, "' is or goes through a symbolic link, which is not followed"));
      throw Error(cat("its file '", location, "' cannot be opened: ", std::strerror(error)));
    }
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode))
      throw Error(cat("'", location, "' is not a regular file"));
    if (info.st_nlink > 1)
      throw Error(cat("'", location, "' has other hard links, it may be a file from elsewhere"));
    return files_.emplace(location, File{std::move(fd), static_cast<std::uint64_t>(info.st_size), 0})
        .first->second;
  }

  std::filesystem::path folder_;
  Fd fd_;
  std::map<std::string, File> files_;
};

}  // namespace

void load_external_data(pb::ModelProto& model, const std::filesystem::path& folder) {
  std::optional<Reader> reader;
  for_each_tensor(model, [&](pb::TensorProto& tensor, const std::string& what) {
    if (tensor.data_location() != pb::TensorProto::EXTERNAL && tensor.external_data_size() == 0) return;
    try {
      if (folder.empty()) throw Error("its data lies in another file, but this model is not a file");
      if (!reader) reader.emplace(folder);
      reader->load(tensor);
    } catch (const Error& e) {
      throw Error(cat(what, ": ", e.what()))
          .hint(
              "external data must be regular files in the model's folder; copy them there, or export with "
              "external_data=False");
    }
  });
}

}  // namespace onnxddp

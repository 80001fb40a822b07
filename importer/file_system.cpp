// The file system of the machine behind the checkpoint protocol, and the lock of a run folder.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "importer/checkpoint.h"

namespace onnxddp {
namespace {

using Path = std::filesystem::path;

[[noreturn]] void fail(const char* doing, const Path& path, int error) {
  throw Error(cat("cannot ", doing, ' ', path.string(), ": ", std::strerror(error)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

Descriptor open_folder(const Path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open the folder", folder, errno);
  return Descriptor(fd);
}

/// A write that failed, with the room that was needed and is left.
[[noreturn]] void write_failed(const Path& path, int error, std::size_t bytes) {
  Error out(cat("cannot write ", path.string(), ": ", std::strerror(error)));
  struct statvfs info {};
  if ((error == ENOSPC || error == EDQUOT) && ::statvfs(path.parent_path().c_str(), &info) == 0) {
    out.add_hint(cat("it needs ", bytes, " bytes, ",
                     static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize,
                     " are free there: make room, or use another --out or a smaller --keep"));
  }
  throw Error(out);
}

void write_all(int fd, const Path& path, const std::string& bytes) {
  constexpr std::size_t kPiece = 8U << 20;
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t put = ::write(fd, bytes.data() + done, std::min(bytes.size() - done, kPiece));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) write_failed(path, errno, bytes.size());
    done += static_cast<std::size_t>(put);
  }
}

class RealFileSystem : public FileSystem {
 public:
  void write_file(const Path& path, const std::string& bytes) override {
    Descriptor file(::open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.get() < 0) write_failed(path, errno, bytes.size());
    // A full disk shows now rather than after the copy; file systems that cannot are none the worse.
    if (!bytes.empty()) {
      const int status = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes.size()));
      if (status == ENOSPC || status == EDQUOT || status == EFBIG) write_failed(path, status, bytes.size());
    }
    write_all(file.get(), path, bytes);
    // Never twice on one file: after a failure Linux takes the lost pages for written.
    if (::fsync(file.get()) != 0) write_failed(path, errno, bytes.size());
    if (::close(file.release()) != 0) write_failed(path, errno, bytes.size());
  }

  std::string read_file(const Path& path) const override {
    const Descriptor file(open_regular(path));
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) fail("read", path, errno);
    std::string out(static_cast<std::size_t>(info.st_size), '\0');
    for (std::size_t done = 0; done < out.size();) {
      const ssize_t got = ::read(file.get(), out.data() + done, out.size() - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("read", path, errno);
      if (got == 0) throw Error(cat("cannot read ", path.string(), ": it became shorter"));
      done += static_cast<std::size_t>(got);
    }
    return out;
  }

  std::uint64_t file_size(const Path& path) const override {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) fail("read", path, errno);
    if (!S_ISREG(info.st_mode)) throw Error(cat("cannot read ", path.string(), ": it is no regular file"));
    return static_cast<std::uint64_t>(info.st_size);
  }

  bool exists(const Path& path) const override {
    struct stat info {};
    if (::lstat(path.c_str(), &info) == 0) return true;
    if (errno != ENOENT && errno != ENOTDIR) fail("look at", path, errno);
    return false;
  }

  std::vector<std::string> list(const Path& folder) const override {
    Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (fd.get() < 0) fail("list the folder", folder, errno);
    DIR* dir = ::fdopendir(fd.get());
    if (dir == nullptr) fail("list the folder", folder, errno);
    fd.release();
    std::vector<std::string> out;
    errno = 0;
    while (const dirent* entry = ::readdir(dir)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") out.push_back(name);
    }
    const int error = errno;
    ::closedir(dir);
    if (error != 0) fail("list the folder", folder, error);
    std::sort(out.begin(), out.end());
    return out;
  }

  void create_directories(const Path& folder) override {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("create the folder", folder, error.value());
  }

  void rename(const Path& from, const Path& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) fail("rename to", to, errno);
  }

  void rename_new(const Path& from, const Path& to) override {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
    if (errno != EINVAL && errno != ENOSYS) fail("rename to", to, errno);
    // Some network file systems cannot; a plain rename would swallow an empty folder.
    if (exists(to)) fail("rename to", to, EEXIST);
    rename(from, to);
  }

  void sync_directory(const Path& folder) override {
    const Descriptor dir = open_folder(folder);
    if (::fsync(dir.get()) != 0 && errno != EINVAL)
      fail("sync the folder", folder, errno);  // EINVAL: it cannot be synced
  }

  void remove_all(const Path& path) override {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) {
      if (errno == ENOENT) return;
      fail("remove", path, errno);
    }
    if (!S_ISDIR(info.st_mode)) {
      if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail("remove", path, errno);
      return;
    }
    for (const std::string& name : list(path)) {
      if (::unlink((path / name).c_str()) != 0 && errno != ENOENT) fail("remove", path / name, errno);
    }
    if (::rmdir(path.c_str()) != 0 && errno != ENOENT) fail("remove", path, errno);
  }

 private:
  /// Links are not followed, pipes not waited for.
  static int open_regular(const Path& path) {
    Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.get() < 0) fail("open", path, errno);
    struct stat info {};
    if (::fstat(file.get(), &info) != 0) fail("read", path, errno);
    if (!S_ISREG(info.st_mode)) throw Error(cat("cannot read ", path.string(), ": it is no regular file"));
    return file.release();
  }
};

/// What the holder of a lock wrote into it, without anything unprintable.
std::string holder(int fd) {
  char text[256] = {};
  const ssize_t got = ::pread(fd, text, sizeof text - 1, 0);
  std::string out(text, got > 0 ? static_cast<std::size_t>(got) : 0);
  out.erase(std::remove_if(out.begin(), out.end(), [](char c) { return c < 0x20 || c > 0x7e; }), out.end());
  return out.empty() ? "another process" : out;
}

}  // namespace

FileSystem& real_file_system() {
  static RealFileSystem instance;
  return instance;
}

RunLock::RunLock(const Path& run) {
  const Path path = run / ".lock";
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (file.get() < 0)
    throw Error(cat("cannot write into ", run.string(), ": ", std::strerror(errno)))
        .in(path.string())
        .hint("make room there, or use another --out");
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK)
      throw usage_error(cat("cannot lock ", path.string(), ": ", std::strerror(errno)));
    throw usage_error(cat(run.string(), " is in use by ", holder(file.get())))
        .in(path.string())
        .hint("wait for that run to end, or give this one another --out");
  }
  char host[128] = "?";
  ::gethostname(host, sizeof host - 1);
  const std::string text = cat("process ", ::getpid(), " on ", host, "\n");
  if (::ftruncate(file.get(), 0) != 0 ||
      ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    throw Error(cat("cannot write into ", run.string(), ": ", std::strerror(errno)))
        .in(path.string())
        .hint("make room there, or use another --out");
  }
  fd_ = file.release();
}

RunLock::~RunLock() { ::close(fd_); }

}  // namespace onnxddp

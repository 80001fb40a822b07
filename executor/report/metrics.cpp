#include "executor/report/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

namespace onnxddp {
namespace {

using Json = nlohmann::ordered_json;  // keys in the order of design A1

[[noreturn]] void fail(const char* doing, const std::string& path) {
  throw Error(cat("cannot ", doing, ' ', path, ": ", std::strerror(errno)));
}

std::string read_at(int fd, const std::string& path, off_t from, std::size_t count) {
  std::string out(count, '\0');
  for (std::size_t done = 0; done < count;) {
    const ssize_t got = ::pread(fd, out.data() + done, count - done, from + static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path);
    if (got == 0) throw Error(cat("cannot read ", path, ": it became shorter"));
    done += static_cast<std::size_t>(got);
  }
  return out;
}

/// The start of the line that ends before `end` (which lies behind a newline, or is the end of the file).
off_t line_start(int fd, const std::string& path, off_t end) {
  off_t piece = 512;                       // most lines are shorter
  for (off_t high = end - 1; high > 0;) {  // the newline at end - 1 is this line's own
    const off_t low = std::max<off_t>(high - piece, 0);
    const std::string block = read_at(fd, path, low, static_cast<std::size_t>(high - low));
    if (const std::size_t newline = block.rfind('\n'); newline != std::string::npos)
      return low + static_cast<off_t>(newline) + 1;
    high = low;
    piece = std::min<off_t>(2 * piece, 1 << 20);
  }
  return 0;
}

/// True for a whole line of ours at or before `step`.
bool is_kept(const std::string& line, std::int64_t step) {
  if (line.empty() || line.back() != '\n') return false;
  const Json object = Json::parse(line, nullptr, false);
  if (!object.is_object()) return false;
  const auto found = object.find("step");
  return found != object.end() && found->is_number_integer() && found->get<std::int64_t>() <= step;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& file, std::int64_t resume_step)
    : path_(file.string()) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("write", path_);
  try {
    cut_back(resume_step);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

MetricsWriter::~MetricsWriter() { ::close(fd_); }

/// From the end: the work grows with what is cut off, not with the length of the run.
void MetricsWriter::cut_back(std::int64_t step) {
  struct stat info {};
  if (::fstat(fd_, &info) != 0) fail("read", path_);
  off_t end = step > 0 ? info.st_size : 0;
  while (end > 0) {
    const off_t start = line_start(fd_, path_, end);
    if (is_kept(read_at(fd_, path_, start, static_cast<std::size_t>(end - start)), step)) break;
    end = start;
  }
  if (end != info.st_size && ::ftruncate(fd_, end) != 0) fail("shorten", path_);
}

void MetricsWriter::append(const std::string& line) {
  struct stat before {};
  if (::fstat(fd_, &before) != 0) fail("write", path_);
  ssize_t done = 0;
  do {
    done = ::write(fd_, line.data(), line.size());
  } while (done < 0 && errno == EINTR);
  if (done == static_cast<ssize_t>(line.size())) return;
  const int error = done < 0 ? errno : ENOSPC;  // a short write to a file: the disk is full
  const bool taken_back = ::ftruncate(fd_, before.st_size) == 0;
  errno = error;
  fail(taken_back ? "write" : "write (half a line is left in)", path_);
}

void MetricsWriter::write(const StepMetrics& m) {
  append(Json({{"event", "step"},
               {"epoch", m.epoch},
               {"step", m.step},
               {"loss", m.loss},
               {"lr", m.lr},
               {"grad_norm", m.grad_norm},
               {"samples", m.samples},
               {"time_s", m.time_s}})
             .dump() +
         '\n');
}

void MetricsWriter::write(const EvalMetrics& m) {
  Json out = {{"event", "eval"}, {"epoch", m.epoch}, {"step", m.step}, {"loss", m.loss}};
  if (m.accuracy) out["accuracy"] = *m.accuracy;
  out["samples"] = m.samples;
  append(out.dump() + '\n');
}

}  // namespace onnxddp

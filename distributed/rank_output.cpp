#include "distributed/rank_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace onnxddp {
namespace {

constexpr std::size_t kLongestLine = 64 << 10;  // a line that goes on is broken here

}  // namespace

void write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n > 0) {
      done += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN) {  // somebody made the terminal non-blocking
      pollfd p{fd, POLLOUT, 0};
      ::poll(&p, 1, 100);
    } else if (errno != EINTR) {
      return;
    }
  }
}

RankOutput::RankOutput(int source, int target, std::string prefix, const std::string& log)
    : source_(source), target_(target), prefix_(std::move(prefix)) {
  if (log.empty()) return;
  log_ = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (log_ < 0) {
    const std::string reason = std::strerror(errno);
    ::close(source_);
    throw Error(cat("cannot write the log ", log, ": ", reason));
  }
}

RankOutput::RankOutput(RankOutput&& other) noexcept
    : source_(std::exchange(other.source_, -1)),
      target_(other.target_),
      log_(std::exchange(other.log_, -1)),
      prefix_(std::move(other.prefix_)),
      pending_(std::move(other.pending_)) {}

RankOutput::~RankOutput() {
  if (source_ >= 0) ::close(source_);
  if (log_ >= 0) ::close(log_);
}

bool RankOutput::pump() {
  char bytes[16 << 10];
  for (;;) {
    const ssize_t n = ::read(source_, bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    const std::string text(bytes, static_cast<std::size_t>(n));
    if (log_ >= 0) write_all(log_, text);
    if (prefix_.empty()) {
      write_all(target_, text);
    } else {
      pending_ += text;
      write_lines();
    }
  }
}

void RankOutput::write_lines() {
  std::size_t begin = 0;
  for (std::size_t end; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    write_line(pending_.substr(begin, end - begin));
  }
  pending_.erase(0, begin);
  if (pending_.size() > kLongestLine) flush();
}

void RankOutput::write_line(std::string line) const {
  // On a terminal rank 0 may be in the middle of its progress line, which it draws again.
  const char* clear = ::isatty(target_) ? "\r\033[K" : "";
  write_all(target_, clear + prefix_ + line + '\n');
}

void RankOutput::flush() {
  if (!pending_.empty()) write_line(std::exchange(pending_, {}));
}

}  // namespace onnxddp

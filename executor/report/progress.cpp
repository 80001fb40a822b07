#include "executor/report/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace onnxddp {
namespace {

constexpr int kBarColumns = 21, kMinBarColumns = 5;
constexpr std::string_view kClear = "\r\x1b[K", kGreen = "\x1b[32m", kReset = "\x1b[0m";

void write_stderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t done = ::write(STDERR_FILENO, text.data(), text.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return;  // nobody is left to tell
    text.remove_prefix(static_cast<std::size_t>(done));
  }
}

int stderr_width() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string format(const char* how, double value) {
  char text[48];
  std::snprintf(text, sizeof text, how, value);
  return text;
}

std::string right(const std::string& text, std::size_t columns) {
  return text.size() < columns ? std::string(columns - text.size(), ' ') + text : text;
}

std::string bar(double share, int columns) {
  const int filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * columns);
  std::string out(static_cast<std::size_t>(filled), '=');
  if (filled < columns) out += '>';
  out.resize(static_cast<std::size_t>(columns), ' ');
  return "[" + out + "]";
}

std::string optional_number(const std::optional<double>& value) { return value ? short_number(*value) : ""; }

std::string lines_of(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + '\n';
  return out;
}

}  // namespace

ProgressOptions stderr_progress(bool quiet, bool no_color, bool dumb) {
  ProgressOptions out;
  out.terminal = ::isatty(STDERR_FILENO) == 1 && !dumb;
  out.color = out.terminal && !no_color;
  out.quiet = quiet;
  out.width = stderr_width;
  return out;
}

std::string short_number(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::fabs(value);
  if (size != 0 && (size < 1e-3 || size >= 1e6)) return format("%.3e", value);
  return format("%.4f", value);
}

std::string short_count(double value) {
  static constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
  if (!std::isfinite(value)) return "?";
  std::size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < std::size(kUnits); ++unit) value /= 1000;
  return format(unit == 0 ? "%.0f" : "%.1f", value) + kUnits[unit];
}

std::string clock_str(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "?";
  const auto whole = static_cast<long long>(seconds + 0.5);
  char text[48];
  if (whole >= 3600) {
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
  } else {
    std::snprintf(text, sizeof text, "%lld:%02lld", whole / 60, whole % 60);
  }
  return text;
}

Progress::Progress(ProgressOptions options) : options_(std::move(options)) {
  if (!options_.write) options_.write = write_stderr;
  if (!options_.now) options_.now = steady_seconds;
  last_ = options_.now();
}

Progress::~Progress() {
  const std::lock_guard lock(mutex_);
  print(clear());
}

/// One write a call, so that lines of several processes do not mix.
void Progress::print(const std::string& text) {
  if (!options_.quiet && !text.empty()) options_.write(text);
}

std::string Progress::clear() {
  if (!live_) return "";
  live_ = false;
  return std::string(kClear);
}

void Progress::begin(const std::vector<std::string>& banner) {
  const std::lock_guard lock(mutex_);
  last_ = options_.now();
  print(lines_of(banner));
}

std::string Progress::live_line(const ProgressStep& s) const {
  const std::string head = cat(right(cat(s.epoch), 3), '/', s.epochs, ' ');
  const std::string tail =
      cat(' ', s.step, '/', s.steps, "  ", short_number(s.loss), "  lr ", short_number(s.lr), "  ",
          short_count(s.samples_per_s), "/s  eta ", clock_str(s.eta_s));
  // One column stays free: some terminals wrap after the last one.
  const int columns = std::max(options_.width() - 1, 1);
  const int room = columns - static_cast<int>(head.size() + tail.size()) - 2;
  const double share = s.steps > 0 ? static_cast<double>(s.step) / static_cast<double>(s.steps) : 0;
  std::string out = head + (room >= kMinBarColumns ? bar(share, std::min(room, kBarColumns)) : "") + tail;
  if (out.size() > static_cast<std::size_t>(columns)) out.resize(static_cast<std::size_t>(columns));
  return out;
}

void Progress::step(const ProgressStep& s) {
  if (options_.quiet) return;
  const std::lock_guard lock(mutex_);
  const double now = options_.now();
  const bool last = s.step == s.steps;
  if (options_.terminal ? now - last_ < options_.redraw_s && !last && live_ : now - last_ < options_.plain_s)
    return;
  last_ = now;
  if (options_.terminal) {
    print(std::string(kClear) + live_line(s));
    live_ = true;
  } else {
    print(cat("step=", s.step, " epoch=", s.epoch, " loss=", short_number(s.loss), " lr=", short_number(s.lr),
              " samples_per_s=", format("%.0f", s.samples_per_s), " eta_s=", format("%.0f", s.eta_s), '\n'));
  }
}

void Progress::epoch(const ProgressEpoch& row) {
  const std::lock_guard lock(mutex_);
  std::string out = clear();
  if (!head_printed_) {
    has_eval_loss_ = row.eval_loss.has_value();
    has_accuracy_ = row.accuracy.has_value();
    out += cat("\nepoch  train loss", has_eval_loss_ ? "   eval loss" : "",
               has_accuracy_ ? "    accuracy" : "", "          lr      |grad|  samples/s      time\n");
  }
  head_printed_ = true;
  out += right(cat(row.epoch), 5) + right(short_number(row.train_loss), 12);
  if (has_eval_loss_) out += right(optional_number(row.eval_loss), 12);
  if (has_accuracy_) out += right(optional_number(row.accuracy), 12);
  out += right(short_number(row.lr), 12) + right(short_number(row.grad_norm), 12) +
         right(short_count(row.samples_per_s), 11) + right(format("%.1f s", row.seconds), 10);
  if (row.best) out += options_.color ? cat("  ", kGreen, "best", kReset) : "  best";
  print(out + '\n');
}

void Progress::note(const std::string& line) {
  const std::lock_guard lock(mutex_);
  print(clear() + line + '\n');
}

void Progress::end(const std::vector<std::string>& summary) {
  const std::lock_guard lock(mutex_);
  print(clear() + lines_of(summary));
}

}  // namespace onnxddp

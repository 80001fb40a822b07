// Errors: Error for a user's mistake (model, data, flags), InternalError for ours. See design: an error says
// what, where in the model, why, and what to do, in at most 6 lines.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#define ONNXDDP_API [[gnu::visibility("default")]]

namespace ONNXDDP_API onnxddp {

/// Concatenates anything printable by an ostream into one string.
template <class... Ts>
std::string cat(const Ts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// The text with control characters as \xNN: names from files must not steer a terminal.
inline std::string printable(std::string_view text) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code != 0x7f)
      out += c;
    else
      out += {'\\', 'x', kHex[code >> 4], kHex[code & 15]};
  }
  return out;
}

/// Exit codes of the program (design A1; the only list).
enum ExitCode : int {
  kExitDone = 0,
  kExitUserError = 1,
  kExitUsage = 2,
  kExitPeer = 3,
  kExitDiverged = 4,
  kExitInternal = 70,
  kExitInterrupted = 130
};

/// A mistake of the user. `what()` is the one-line message; at/in/hint add the further lines of the report.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, int exit_code = kExitUserError)
      : std::runtime_error(message), exit_code_(exit_code) {}

  /// Shapes and attributes at the place, e.g. "x: f32[N,64,56,56]".
  Error&& at(std::string text) && { return std::move(*this).line(at_, std::move(text)); }
  /// File, node, opset, e.g. "model.onnx, node 17, opset 13".
  Error&& in(std::string text) && { return std::move(*this).line(in_, std::move(text)); }
  /// What to do about it.
  Error&& hint(std::string text) && { return std::move(*this).line(hint_, std::move(text)); }

  /// Adds the place to an error that was thrown deeper down; the first place given wins.
  void add_in(std::string text) {
    if (in_.empty()) in_ = std::move(text);
  }
  void add_hint(std::string text) {
    if (hint_.empty()) hint_ = std::move(text);
  }

  int exit_code() const { return exit_code_; }
  const std::string& place() const { return in_; }
  const std::string& advice() const { return hint_; }

  /// The whole report, without a final newline: first line without the "onnx-ddp: error: " prefix.
  std::string report() const {
    std::string out = what();
    if (!at_.empty()) out += "\n   at    " + at_;
    if (!in_.empty()) out += "\n   in    " + in_;
    if (!hint_.empty()) out += "\n   hint  " + hint_;
    return out;
  }

 private:
  Error&& line(std::string& field, std::string text) && {
    field = std::move(text);
    return std::move(*this);
  }

  int exit_code_;
  std::string at_, in_, hint_;
};

/// A usage mistake (flags, keys, environment): exit code 2.
inline Error usage_error(const std::string& message) { return Error(message, kExitUsage); }

/// A bug of ours; main prints it and exits with 70.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {
template <class... Ts>
[[noreturn]] void check_failed(const char* condition, const char* file, int line, const Ts&... parts) {
  throw InternalError(cat("internal check failed: ", condition, " (", file, ":", line, ") ", parts...));
}
}  // namespace detail

}  // namespace onnxddp

/// Throws InternalError when `condition` is false; further arguments are printed.
#define CHECK(condition, ...)                                                                     \
  do {                                                                                            \
    if (!(condition))                                                                             \
      ::onnxddp::detail::check_failed(#condition, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

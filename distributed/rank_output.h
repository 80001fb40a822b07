// What a rank prints, on its way to the terminal and the log.
#pragma once

#include <string>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// One output stream of one rank: reads from a pipe, writes to `target` and optionally to a log file. With a
/// prefix only whole lines are passed on, each in one write; without one the bytes are passed on as they
/// come.
class RankOutput {
 public:
  /// Takes over `source` (a non-blocking pipe). `log` empty: no log file. Throws Error if the log cannot be
  /// written.
  RankOutput(int source, int target, std::string prefix, const std::string& log);
  RankOutput(RankOutput&& other) noexcept;
  RankOutput& operator=(RankOutput&&) = delete;
  ~RankOutput();

  int source() const { return source_; }
  /// Passes on what is there; false at the end of the stream.
  bool pump();
  /// Passes on an unfinished last line.
  void flush();

 private:
  void write_lines();
  void write_line(std::string line) const;

  int source_, target_, log_ = -1;
  std::string prefix_, pending_;
};

/// Writes everything, or gives up on an error (the reader is gone).
void write_all(int fd, const std::string& text);

}  // namespace onnxddp

// What a person sees while training runs: banner, one live line, rows that stay, summary.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

struct ProgressOptions {
  /// A live line that rewrites itself; else a plain line now and then, without CR or escapes.
  bool terminal = false;
  bool color = false;                              // on a terminal only
  bool quiet = false;                              // nothing at all
  double redraw_s = 0.1;                           // least time between two states of the live line
  double plain_s = 10;                             // least time between two plain lines
  std::function<int()> width = [] { return 80; };  // columns, asked at every redraw
  std::function<void(std::string_view)> write;     // where the text goes; default: standard error
  std::function<double()> now;                     // seconds of a steady clock; default: the machine's
};

/// For the standard error of this process: live line if it is a terminal and `dumb` (TERM=dumb, CI) is not
/// set, its width, colours unless `no_color` (NO_COLOR). The environment is read by the caller.
ProgressOptions stderr_progress(bool quiet, bool no_color, bool dumb);

/// Both counts from 1; loss is the last step's mean.
struct ProgressStep {
  std::int64_t epoch = 1, epochs = 1;
  std::int64_t step = 1, steps = 1;  // of the whole run
  double loss = 0, lr = 0, samples_per_s = 0, eta_s = 0;
};

/// One line of the table that stays.
struct ProgressEpoch {
  std::int64_t epoch = 1;
  double train_loss = 0;
  std::optional<double> eval_loss, accuracy;
  double lr = 0, grad_norm = 0, samples_per_s = 0, seconds = 0;
  bool best = false;
};

/// Safe for several threads: a line is never torn by another.
class Progress {
 public:
  explicit Progress(ProgressOptions options);
  /// Leaves no half line on the terminal.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Banner lines, without newlines.
  void begin(const std::vector<std::string>& banner);
  /// A step is done. Cheap: most calls print nothing.
  void step(const ProgressStep& step);
  /// An epoch is done: a row, with the table's head above the first.
  void epoch(const ProgressEpoch& row);
  /// A line that stays: a warning, a save, a slow part that announces itself.
  void note(const std::string& line);
  /// The last lines; the live line is gone.
  void end(const std::vector<std::string>& summary);

 private:
  void print(const std::string& text);
  std::string live_line(const ProgressStep& step) const;
  std::string clear();

  ProgressOptions options_;
  std::mutex mutex_;
  bool live_ = false, head_printed_ = false;
  bool has_eval_loss_ = false, has_accuracy_ = false;  // columns of the table, by its first row
  double last_ = 0;
};

/// `0.3101`, `1.235e-05`, `nan`: at most four digits behind the point.
std::string short_number(double value);
/// `950`, `44.1k`, `1.2M`
std::string short_count(double value);
/// `0:02`, `12:05`, `1:02:03`
std::string clock_str(double seconds);

}  // namespace onnxddp

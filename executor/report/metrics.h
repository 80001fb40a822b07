// metrics.jsonl: one JSON object a line, for programs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// An optimizer step; step and epoch count from 1. See design A1 for the meaning of each number.
struct StepMetrics {
  std::int64_t epoch = 1, step = 1;
  double loss = 0, lr = 0, grad_norm = 0;
  std::int64_t samples = 0;  // since the start, all ranks
  double time_s = 0;         // of this step
};

struct EvalMetrics {
  std::int64_t epoch = 1, step = 1;
  double loss = 0;
  std::optional<double> accuracy;  // left out where the loss has none
  std::int64_t samples = 0;        // evaluated
};

/// Appends to a file, one write a line. Doubles are written so that they read back to the same value; NaN and
/// infinities as null, since JSON has no others and readers expect numbers or nothing. Throws Error with the
/// path when the disk is full; a half line is taken back.
class MetricsWriter {
 public:
  /// Opens or creates the file. What does not end in a newline, or belongs to a step after `resume_step`, is
  /// cut off: a run that goes on from a checkpoint writes those lines again. 0 starts an empty file.
  MetricsWriter(const std::filesystem::path& file, std::int64_t resume_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void write(const StepMetrics& metrics);
  void write(const EvalMetrics& metrics);

 private:
  void append(const std::string& line);
  void cut_back(std::int64_t step);

  std::string path_;
  int fd_ = -1;
};

}  // namespace onnxddp

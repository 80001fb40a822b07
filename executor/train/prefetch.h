// The batches of this rank in order, prepared ahead by a thread where that pays.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "distributed/sampler.h"
#include "executor/train/data.h"

namespace ONNXDDP_API onnxddp {

struct Batch {
  std::int64_t epoch = 0, index = 0;  // from 0; index counts micro-batches within the epoch
  std::int64_t rows = 0;
  Feeds feeds;
};

/// An endless stream over epochs, from a given position. The order is the sampler's, never that of threads.
class BatchStream {
 public:
  /// `source` and `sampler` must outlive the stream.
  BatchStream(const BatchSource& source, const Sampler& sampler, std::int64_t epoch, std::int64_t index);
  ~BatchStream();
  BatchStream(const BatchStream&) = delete;
  BatchStream& operator=(const BatchStream&) = delete;
  /// Waits for the next batch; throws what reading it threw.
  Batch next();
  /// Seconds that next() has waited for data since the stream began.
  double waited() const { return waited_; }

 private:
  Batch make();
  void work();

  const BatchSource& source_;
  const Sampler& sampler_;
  std::int64_t epoch_, index_;
  std::vector<std::vector<std::int64_t>> order_;  // of epoch_, empty: not made yet
  bool threaded_;
  std::size_t capacity_ = 0;
  double waited_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> ready_;
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace onnxddp

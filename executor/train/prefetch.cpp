#include "executor/train/prefetch.h"

#include <chrono>

namespace onnxddp {
namespace {

/// Copying so few bytes from memory takes less time than handing them from one thread to another.
constexpr std::size_t kInlineBytes = 256 * 1024;

}  // namespace

BatchStream::BatchStream(const BatchSource& source, const Sampler& sampler, std::int64_t epoch,
                         std::int64_t index)
    : source_(source), sampler_(sampler), epoch_(epoch), index_(index) {
  const std::size_t bytes = source.row_bytes() * static_cast<std::size_t>(sampler.options().batch_size);
  threaded_ = !source.cached() || bytes > kInlineBytes;
  if (!threaded_) return;
  capacity_ = bytes < (1U << 20) ? 16 : 4;
  thread_ = std::thread([this] { work(); });
}

BatchStream::~BatchStream() {
  if (!threaded_) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Batch BatchStream::make() {
  if (order_.empty()) order_ = sampler_.epoch(epoch_);
  if (index_ >= static_cast<std::int64_t>(order_.size())) {
    ++epoch_;
    index_ = 0;
    order_ = sampler_.epoch(epoch_);
  }
  const std::vector<std::int64_t>& rows = order_[static_cast<std::size_t>(index_)];
  Batch batch{epoch_, index_, static_cast<std::int64_t>(rows.size()), source_.batch(rows)};
  ++index_;
  return batch;
}

void BatchStream::work() {
  try {
    for (;;) {
      Batch batch = make();
      std::unique_lock lock(mutex_);
      ready_.push_back(std::move(batch));
      changed_.notify_all();
      // Wait until half of the ring is used up: waking for every batch would cost more than it brings.
      if (ready_.size() >= capacity_)
        changed_.wait(lock, [&] { return stopping_ || ready_.size() <= capacity_ / 2; });
      if (stopping_) return;
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

Batch BatchStream::next() {
  if (!threaded_) return make();
  std::unique_lock lock(mutex_);
  if (ready_.empty()) {
    const auto begin = std::chrono::steady_clock::now();
    changed_.wait(lock, [&] { return !ready_.empty() || failure_ != nullptr; });
    waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  if (ready_.empty()) std::rethrow_exception(failure_);
  Batch batch = std::move(ready_.front());
  ready_.pop_front();
  if (ready_.size() <= capacity_ / 2) changed_.notify_all();
  return batch;
}

}  // namespace onnxddp

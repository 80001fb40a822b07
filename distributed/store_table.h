// The table behind a store: keys, values, limits, waiting.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "distributed/store.h"

namespace onnxddp {

inline constexpr std::size_t kMaxKey = 256, kMaxValue = std::size_t{16} << 20, kMaxKeys = 65536,
                             kMaxTable = std::size_t{64} << 20;

/// A Store in memory. `on_change` is called after each change, without a lock held, by the thread that made
/// it.
class StoreTable : public Store {
 public:
  explicit StoreTable(std::function<void()> on_change = {}) : on_change_(std::move(on_change)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override;

  bool has_all(const std::vector<std::string>& keys);

 private:
  bool has_all_locked(const std::vector<std::string>& keys) const;
  void put(const std::string& key, const std::string& value);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::function<void()> on_change_;
};

/// Throws Error unless the key may be used.
void check_key(const std::string& key);

/// The error of a wait that took too long.
[[noreturn]] void throw_wait_timeout(const std::vector<std::string>& keys, std::chrono::milliseconds timeout);

}  // namespace onnxddp

#include "distributed/store_table.h"

#include <algorithm>
#include <charconv>

#include "distributed/communicator.h"
#include "distributed/digest.h"

namespace onnxddp {
namespace {

bool key_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '/' || c == '_' ||
         c == '.' || c == '-';
}

}  // namespace

void check_key(const std::string& key) {
  if (key.empty() || key.size() > kMaxKey || !std::all_of(key.begin(), key.end(), key_character)) {
    throw Error(cat("a store key must be 1 to ", kMaxKey, " of [A-Za-z0-9/_.-]"));
  }
}

void throw_wait_timeout(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  const std::string more = keys.size() > 1 ? cat(" and ", keys.size() - 1, " more") : "";
  throw PeerError(cat("no rank has set ", keys.empty() ? "nothing" : "'" + keys[0] + "'", more,
                      " in the store within ", static_cast<double>(timeout.count()) / 1000, " s"));
}

void StoreTable::put(const std::string& key, const std::string& value) {
  check_key(key);
  const auto found = values_.find(key);
  const std::size_t old = found == values_.end() ? 0 : key.size() + found->second.size();
  if (value.size() > kMaxValue)
    throw Error(cat("a store value may have ", kMaxValue, " bytes, not ", value.size()));
  if (found == values_.end() && values_.size() >= kMaxKeys)
    throw Error(cat("the store is full: ", kMaxKeys, " keys"));
  const std::size_t bytes = bytes_ - old + key.size() + value.size();
  if (bytes > kMaxTable) throw Error(cat("the store is full: ", kMaxTable, " bytes"));
  values_[key] = value;
  bytes_ = bytes;
}

void StoreTable::set(const std::string& key, const std::string& value) {
  {
    const std::lock_guard lock(mutex_);
    put(key, value);
  }
  changed_.notify_all();
  if (on_change_) on_change_();
}

std::optional<std::string> StoreTable::try_get(const std::string& key) {
  check_key(key);
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

std::string StoreTable::get(const std::string& key, std::chrono::milliseconds timeout) {
  wait({key}, timeout);
  return *try_get(key);  // keys are never removed
}

std::int64_t StoreTable::add(const std::string& key, std::int64_t amount) {
  std::int64_t sum = 0;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = values_.find(key); found != values_.end()) {
      const auto& text = found->second;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), sum);
      if (error != std::errc() || end != text.data() + text.size())
        throw Error(cat("store key '", key, "' is no counter"));
    }
    if (__builtin_add_overflow(sum, amount, &sum)) throw Error(cat("store counter '", key, "' overflows"));
    put(key, std::to_string(sum));
  }
  changed_.notify_all();
  if (on_change_) on_change_();
  return sum;
}

bool StoreTable::has_all_locked(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return values_.count(key) > 0; });
}

bool StoreTable::has_all(const std::vector<std::string>& keys) {
  const std::lock_guard lock(mutex_);
  return has_all_locked(keys);
}

void StoreTable::wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  for (const auto& key : keys) check_key(key);
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, timeout, [&] { return has_all_locked(keys); }))
    throw_wait_timeout(keys, timeout);
}

std::unique_ptr<Store> make_memory_store() { return std::make_unique<StoreTable>(); }

std::string random_secret() {
  unsigned char bytes[32];
  fill_random(bytes, sizeof(bytes));
  return to_hex(bytes, sizeof(bytes));
}

}  // namespace onnxddp

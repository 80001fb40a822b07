// Store: a small key-value service for rendezvous, agreement and heartbeats. TCP on loopback or the job's
// network.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

/// Keys are up to 256 of `[A-Za-z0-9/_.-]`, values up to 16 MiB, 65536 keys and 64 MiB in all; beyond that
/// Error. A server that is gone is PeerError. Any thread may call; one thread's waiting holds up no other.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits for the key; throws PeerError after `timeout`.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Adds to a counter (from 0) and returns the new value.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  virtual void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) = 0;
};

/// In this process (tests, thread ranks).
std::unique_ptr<Store> make_memory_store();

/// Serves a store on `host` (default loopback) at `port` (0: any free). Clients log in with HMAC-SHA256 over
/// a nonce by `secret`; others are turned away. Frames and the number of keys are limited.
class StoreServer {
 public:
  StoreServer(const std::string& host, std::uint16_t port, const std::string& secret);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  std::uint16_t port() const;
  /// The served table without a connection, for the process that serves it.
  Store& local();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
/// Connects (retrying until `timeout`) and logs in; throws PeerError, or Error when the secret is refused.
std::unique_ptr<Store> connect_store(const std::string& host, std::uint16_t port, const std::string& secret,
                                     std::chrono::milliseconds timeout);
/// 64 random hex digits.
std::string random_secret();

}  // namespace onnxddp

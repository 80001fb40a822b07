// What goes over the wire between a store and its clients. All numbers are big-endian.
//   server: magic[8] version[2] nonce[16]
//   client: magic[8] version[2] nonce[16] HMAC(secret, "client" nonces)[32]
//   server: status[1] HMAC(secret, "server" nonces)[32]
//   then frames either way: length[4] mac[16] payload[length]; the mac covers direction, running number and
//   payload.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "distributed/digest.h"

namespace onnxddp {

inline constexpr std::string_view kStoreMagic("onnxddp\0", 8);
inline constexpr std::uint16_t kStoreVersion = 1;
inline constexpr std::size_t kNonce = 16, kMac = 16;
inline constexpr std::size_t kGreeting = 8 + 2 + kNonce, kLogin = kGreeting + 32, kWelcome = 1 + 32,
                             kFrameHead = 4 + kMac;
inline constexpr std::size_t kMaxFrame = (std::size_t{16} << 20) + 4096;
inline constexpr std::uint32_t kMaxWaitKeys = 4096;

enum class StoreOp : std::uint8_t { set = 1, get = 2, add = 3, wait = 4 };
enum class StoreStatus : std::uint8_t { ok = 0, missing = 1, error = 2 };

/// Appends numbers and strings to a payload.
class FrameWriter {
 public:
  FrameWriter& number(std::uint64_t value, int bytes) {
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) out_ += static_cast<char>(value >> shift & 255);
    return *this;
  }
  FrameWriter& text(std::string_view value) {
    number(value.size(), 4);
    out_ += value;
    return *this;
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Reads what FrameWriter wrote; throws Error beyond the end.
class FrameReader {
 public:
  explicit FrameReader(std::string_view in) : in_(in) {}
  std::uint64_t number(int bytes) {
    std::uint64_t value = 0;
    for (const char c : raw(static_cast<std::size_t>(bytes)))
      value = value << 8 | static_cast<unsigned char>(c);
    return value;
  }
  std::string text() { return std::string(raw(number(4))); }
  std::string_view raw(std::size_t count) {
    if (count > in_.size()) throw Error("a store frame ends early");
    const auto part = in_.substr(0, count);
    in_.remove_prefix(count);
    return part;
  }
  void finish() const {
    if (!in_.empty()) throw Error("a store frame is too long");
  }

 private:
  std::string_view in_;
};

/// The keys of one connection: proofs of the secret at login, then a mac for each frame.
class StoreKeys {
 public:
  StoreKeys(const std::string& secret, std::string_view server_nonce, std::string_view client_nonce) {
    const std::string nonces = std::string(server_nonce) + std::string(client_nonce);
    client_proof = hmac_sha256(secret, "client" + nonces);
    server_proof = hmac_sha256(secret, "server" + nonces);
    const Digest key = hmac_sha256(secret, "frames" + nonces);
    key_.assign(key.begin(), key.end());
  }

  Digest client_proof, server_proof;

  /// A frame ready to send.
  std::string seal(bool from_server, std::uint64_t number, const std::string& payload) const {
    const Digest mac = mac_of(from_server, number, payload);
    std::string frame = FrameWriter().number(payload.size(), 4).take();
    frame.append(reinterpret_cast<const char*>(mac.data()), kMac);
    return frame + payload;
  }
  /// True if `mac` (kMac bytes) belongs to the payload.
  bool genuine(bool from_server, std::uint64_t number, const std::string& payload, const char* mac) const {
    return same_secret(mac_of(from_server, number, payload).data(),
                       reinterpret_cast<const unsigned char*>(mac), kMac);
  }

 private:
  Digest mac_of(bool from_server, std::uint64_t number, const std::string& payload) const {
    return hmac_sha256(key_, FrameWriter().number(from_server, 1).number(number, 8).take() + payload);
  }

  std::string key_;
};

}  // namespace onnxddp

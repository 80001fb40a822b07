#include "distributed/digest.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cerrno>

namespace onnxddp {

Digest sha256(std::string_view text) {
  Digest out{};
  unsigned size = 0;
  CHECK(EVP_Digest(text.data(), text.size(), out.data(), &size, EVP_sha256(), nullptr) == 1 &&
        size == out.size());
  return out;
}

Digest hmac_sha256(std::string_view key, std::string_view text) {
  Digest out{};
  unsigned size = 0;
  const auto* data = reinterpret_cast<const unsigned char*>(text.data());
  const auto* made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), data, text.size(), out.data(), &size);
  CHECK(made != nullptr && size == out.size());
  return out;
}

std::string to_hex(const unsigned char* bytes, std::size_t count) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(2 * count);
  for (std::size_t i = 0; i < count; ++i) {
    out += kDigits[bytes[i] >> 4];
    out += kDigits[bytes[i] & 15];
  }
  return out;
}

bool same_secret(const unsigned char* a, const unsigned char* b, std::size_t count) {
  return CRYPTO_memcmp(a, b, count) == 0;
}

void fill_random(void* out, std::size_t count) {
  auto* at = static_cast<unsigned char*>(out);
  while (count > 0) {
    const ssize_t got = getrandom(at, count, 0);
    if (got < 0 && errno == EINTR) continue;
    CHECK(got > 0, "getrandom failed, errno ", errno);
    at += got;
    count -= static_cast<std::size_t>(got);
  }
}

}  // namespace onnxddp

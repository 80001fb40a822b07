// SHA-256 and HMAC-SHA256 by libcrypto: the store's login and the agreement of ranks.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "graph/error.h"

namespace ONNXDDP_API onnxddp {

using Digest = std::array<unsigned char, 32>;

Digest sha256(std::string_view text);
Digest hmac_sha256(std::string_view key, std::string_view text);
/// Lower-case hex digits of the bytes.
std::string to_hex(const unsigned char* bytes, std::size_t count);
/// Compares without a branch on the content.
bool same_secret(const unsigned char* a, const unsigned char* b, std::size_t count);
/// Fills from the system's random source.
void fill_random(void* out, std::size_t count);

}  // namespace onnxddp

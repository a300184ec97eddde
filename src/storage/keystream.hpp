// SPDX-License-Identifier: Apache-2.0
//
// The key stream of ChaCha20 by libcrypto: random numbers that are secret as long as their key is.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

struct evp_cipher_ctx_st;

namespace weft::storage {

class Keystream {
 public:
  /// Key; block counter and nonce (words 12 to 15 of the state, RFC 8439, section 2.3). Throws Error(internal) if
  /// libcrypto has no ChaCha20.
  Keystream(const std::array<std::uint32_t, 8>& key, const std::array<std::uint32_t, 4>& counter_and_nonce);
  /// The next words.
  void fill(std::span<std::uint32_t> words);

 private:
  std::unique_ptr<evp_cipher_ctx_st, void (*)(evp_cipher_ctx_st*)> context_;
};

}  // namespace weft::storage

// SPDX-License-Identifier: Apache-2.0
#include "storage/keystream.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <bit>

#include "base/error.hpp"

namespace weft::storage {
namespace {

static_assert(std::endian::native == std::endian::little, "ChaCha20 has words of little-endian bytes");

void require(bool good) {
  if (!good) throw error(ExitCode::internal, "libcrypto has no ChaCha20 (is the OpenSSL configuration restricted?)");
}

template <class Word>
auto* bytes_of(Word* words) {
  return reinterpret_cast<unsigned char*>(words);
}

}  // namespace

Keystream::Keystream(const std::array<std::uint32_t, 8>& key, const std::array<std::uint32_t, 4>& counter_and_nonce)
    : context_(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free) {
  std::array<std::uint32_t, 8> secret = key;
  std::array<std::uint32_t, 4> input = counter_and_nonce;
  require(context_ != nullptr && EVP_EncryptInit_ex(context_.get(), EVP_chacha20(), nullptr, bytes_of(secret.data()),
                                                    bytes_of(input.data())) == 1);
}

void Keystream::fill(std::span<std::uint32_t> words) {
  std::fill(words.begin(), words.end(), 0u);
  int written = 0;
  const int bytes = static_cast<int>(words.size_bytes());
  require(EVP_EncryptUpdate(context_.get(), bytes_of(words.data()), &written, bytes_of(words.data()), bytes) == 1 &&
          written == bytes);
}

}  // namespace weft::storage

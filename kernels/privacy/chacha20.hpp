// SPDX-License-Identifier: Apache-2.0
//
// ChaCha20, the block function of RFC 8439, section 2.3: the code of one thread, on the host and on a GPU. Without the
// key its output cannot be told from random bits, whatever else is known of it. kernels/random.hpp has a generator of
// good statistics, which is faster and no such thing.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"

namespace weft::kernels {

struct ChachaBlock {
  std::uint32_t word[16];
};

/// State words 4 to 11, and 12 to 15: the counter and the nonce.
struct ChachaKey {
  std::uint32_t word[8];
};
struct ChachaInput {
  std::uint32_t word[4];
};

WEFT_HOST_DEVICE inline void chacha_quarter_round(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                                                  std::uint32_t& d) {
  const auto rotate = [](std::uint32_t value, int bits) { return value << bits | value >> (32 - bits); };
  a += b, d = rotate(d ^ a, 16);
  c += d, b = rotate(b ^ c, 12);
  a += b, d = rotate(d ^ a, 8);
  c += d, b = rotate(b ^ c, 7);
}

WEFT_HOST_DEVICE inline ChachaBlock chacha20(const ChachaKey& key, const ChachaInput& input) {
  std::uint32_t start[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u};
  for (int i = 0; i < 8; ++i) start[4 + i] = key.word[i];
  for (int i = 0; i < 4; ++i) start[12 + i] = input.word[i];
  ChachaBlock x;
  for (int i = 0; i < 16; ++i) x.word[i] = start[i];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 4; ++i) chacha_quarter_round(x.word[i], x.word[4 + i], x.word[8 + i], x.word[12 + i]);
    for (int i = 0; i < 4; ++i)
      chacha_quarter_round(x.word[i], x.word[4 + (i + 1) % 4], x.word[8 + (i + 2) % 4], x.word[12 + (i + 3) % 4]);
  }
  for (int i = 0; i < 16; ++i) x.word[i] += start[i];
  return x;
}

}  // namespace weft::kernels

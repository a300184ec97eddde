// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/byte_alphabet.hpp"

#include <array>

#include "base/text.hpp"

namespace weft::language_model {
namespace {

/// The character of each byte: printable ones of Latin-1 stand for themselves, the others for U+0100, U+0101, …
/// (bytes_to_unicode of GPT-2's encoder.py).
const std::array<long, 256>& alphabet() {
  static const std::array<long, 256> characters = [] {
    std::array<long, 256> all{};
    long next = 0x100;
    for (long byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      all[static_cast<std::size_t>(byte)] = printable ? byte : next++;
    }
    return all;
  }();
  return characters;
}

}  // namespace

std::string to_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) append_character(text, alphabet()[static_cast<unsigned char>(byte)]);
  return text;
}

bool from_alphabet(std::string_view text, std::string& bytes) {
  static const std::array<int, 0x200> byte_of = [] {
    std::array<int, 0x200> all;
    all.fill(-1);
    for (int byte = 0; byte < 256; ++byte)
      all[static_cast<std::size_t>(alphabet()[static_cast<std::size_t>(byte)])] = byte;
    return all;
  }();
  bytes.clear();
  while (!text.empty()) {
    const Character next = first_character(text);
    if (next.code < 0 || next.code >= 0x200 || byte_of[static_cast<std::size_t>(next.code)] < 0) return false;
    bytes += static_cast<char>(byte_of[static_cast<std::size_t>(next.code)]);
    text.remove_prefix(next.bytes);
  }
  return true;
}

}  // namespace weft::language_model

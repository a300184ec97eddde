// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/precompiled.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

/// nullopt for a text that is not base64.
std::optional<std::string> from_base64(std::string_view text) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.size() % 4 != 0) return std::nullopt;
  std::size_t padding = 0;
  while (padding < 2 && text.ends_with('=')) {
    text.remove_suffix(1);
    ++padding;
  }
  std::string bytes;
  std::uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const std::size_t digit = digits.find(c);
    if (digit == digits.npos) return std::nullopt;
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes += static_cast<char>(bits >> count & 0xff);
    }
  }
  return bytes;
}

std::uint32_t little_endian(std::string_view bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 4; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// A unit of the trie.
bool has_leaf(std::uint32_t unit) { return (unit >> 8 & 1) != 0; }
std::uint32_t leaf_value(std::uint32_t unit) { return unit & 0x7fffffff; }
std::uint32_t label_of(std::uint32_t unit) { return unit & 0x800000ff; }
std::uint32_t child_offset(std::uint32_t unit) { return unit >> 10 << ((unit & 0x200) >> 6); }

constexpr std::size_t kLongestCluster = 5;  // of bytes; longer ones are changed character by character

}  // namespace

Precompiled::Precompiled(std::string_view charsmap, std::string_view source) {
  const auto refuse = [&](const char* why) {
    return error(ExitCode::data,
                 "{}: the normaliser \"Precompiled\" has a precompiled_charsmap that {}; is it complete?", source, why);
  };
  const std::optional<std::string> bytes = from_base64(charsmap);
  if (!bytes) throw refuse("is not base64");
  const std::string_view all = *bytes;
  const std::size_t size = all.size() < 4 ? 0 : little_endian(all);
  if (size == 0 || size % 4 != 0 || size > all.size() - 4) throw refuse("is shorter than its trie");
  for (std::size_t at = 4; at < 4 + size; at += 4) units_.push_back(little_endian(all.substr(at)));
  texts_ = all.substr(4 + size);
  if (first_invalid(texts_) != texts_.npos) throw refuse("has texts that are not valid UTF-8");
}

/// The text of the shortest key with which the part begins.
std::optional<std::string_view> Precompiled::replacement(std::string_view part) const {
  // A reference beyond the units or into a character is that of a damaged map: no key.
  const auto unit_at = [&](std::size_t node) { return node < units_.size() ? units_[node] : 0; };
  std::size_t node = child_offset(units_[0]);
  for (const char c : part) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0) break;
    node ^= byte;
    const std::uint32_t unit = unit_at(node);
    if (label_of(unit) != byte) break;
    node ^= child_offset(unit);
    if (!has_leaf(unit)) continue;
    const std::size_t begin = leaf_value(unit_at(node));
    if (begin > texts_.size() || (begin < texts_.size() && (texts_[begin] & 0xc0) == 0x80)) return std::nullopt;
    return std::string_view(texts_).substr(begin, texts_.find('\0', begin) - begin);
  }
  return std::nullopt;
}

void Precompiled::apply(NormalisedText& text, const TextPlace&) const {
  std::string changed;
  each_grapheme(text.text, [&](std::string_view cluster) {
    if (cluster.size() <= kLongestCluster)
      if (const auto other = replacement(cluster)) {
        changed += *other;
        return;
      }
    while (!cluster.empty()) {
      const std::string_view part = cluster.substr(0, first_character(cluster).bytes);
      changed += replacement(part).value_or(part);
      cluster.remove_prefix(part.size());
    }
  });
  text.text = std::move(changed);
}

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
#include "language_model/generation/growing_text.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace weft::language_model {

std::vector<std::uint32_t> end_symbols(const Tokenizer& tokenizer) {
  std::vector<std::uint32_t> ids = tokenizer.special_tokens().ends;
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "EOS"})
    if (const std::int64_t id = tokenizer.special(name); id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end())
      ids.push_back(static_cast<std::uint32_t>(id));
  return ids;
}

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const std::size_t invalid = first_invalid(text);
    valid += text.substr(0, invalid);
    if (invalid == text.npos) break;
    append_character(valid, 0xFFFD);
    text.remove_prefix(invalid + 1);
  }
  return valid;
}

GrowingText::GrowingText(const Tokenizer& tokenizer, std::span<const std::string> stops,
                         std::span<const std::uint32_t> ends)
    : tokenizer_(tokenizer), stops_(stops), ends_(ends) {}

GrowingText::End GrowingText::append(std::uint32_t token) {
  ++tokens_;
  if (std::find(ends_.begin(), ends_.end(), token) != ends_.end()) return end_ = End::symbol;
  const std::size_t before = bytes_.size();
  bytes_ += tokenizer_.detokenise({&token, 1}, true);
  // A stop text that was not there before ends in the new bytes.
  std::size_t first = bytes_.npos;
  for (const std::string& stop : stops_)
    first = std::min(first, bytes_.find(stop, before >= stop.size() ? before - stop.size() + 1 : 0));
  if (first == bytes_.npos) return end_;
  bytes_.resize(first);
  return end_ = End::stop;
}

}  // namespace weft::language_model

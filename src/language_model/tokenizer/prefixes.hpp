// SPDX-License-Identifier: Apache-2.0
// A set of texts, to find those with which a text begins.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::language_model {

class Prefixes {
 public:
  using Entry = std::pair<std::string_view, std::uint32_t>;

  Prefixes() = default;
  /// Texts that are not empty, each once, with a number; what they refer to must outlive the object.
  explicit Prefixes(std::vector<Entry> entries);

  bool empty() const { return entries_.empty(); }
  /// Calls found(length, number) for each entry with which the text begins, the shortest first.
  template <class Found>
  void each(std::string_view text, const Found& found) const {
    if (entries_.empty() || text.empty()) return;
    const auto first = static_cast<unsigned char>(text[0]);
    std::size_t begin = begins_[first], end = begins_[first + 1];
    // Entries from `begin` to `end` begin with the first `length` bytes of the text; only the first can be no longer.
    for (std::size_t length = 1; begin < end; ++length) {
      if (entries_[begin].first.size() == length) {
        found(length, entries_[begin].second);
        ++begin;
      }
      if (length == text.size()) return;
      narrow(begin, end, length, text[length]);
    }
  }

 private:
  void narrow(std::size_t& begin, std::size_t& end, std::size_t at, char byte) const;

  std::vector<Entry> entries_;             // sorted
  std::array<std::size_t, 257> begins_{};  // [byte] first entry that begins with it or a larger one
};

}  // namespace weft::language_model

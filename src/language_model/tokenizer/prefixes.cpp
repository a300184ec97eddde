// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/prefixes.hpp"

#include <algorithm>

namespace weft::language_model {

Prefixes::Prefixes(std::vector<Entry> entries) : entries_(std::move(entries)) {
  std::sort(entries_.begin(), entries_.end());
  for (const Entry& entry : entries_) ++begins_[static_cast<unsigned char>(entry.first[0]) + std::size_t{1}];
  for (std::size_t byte = 1; byte < begins_.size(); ++byte) begins_[byte] += begins_[byte - 1];
}

/// Keeps the entries with this byte at this place; all of them have one there.
void Prefixes::narrow(std::size_t& begin, std::size_t& end, std::size_t at, char byte) const {
  const auto value = [&](const Entry& entry) { return static_cast<unsigned char>(entry.first[at]); };
  const auto wanted = static_cast<unsigned char>(byte);
  const auto first = entries_.begin() + static_cast<std::ptrdiff_t>(begin),
             last = entries_.begin() + static_cast<std::ptrdiff_t>(end);
  const auto low = std::partition_point(first, last, [&](const Entry& entry) { return value(entry) < wanted; });
  const auto high = std::partition_point(low, last, [&](const Entry& entry) { return value(entry) <= wanted; });
  begin = static_cast<std::size_t>(low - entries_.begin());
  end = static_cast<std::size_t>(high - entries_.begin());
}

}  // namespace weft::language_model

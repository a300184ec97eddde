// SPDX-License-Identifier: Apache-2.0
// Where a part of a text is in its source, for messages.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace weft::language_model {

struct TextPlace {
  std::string_view source;     ///< name of the text or file
  std::string_view text;       ///< a part of the source, or what a normaliser made of it
  std::size_t offset = 0;      ///< of that part in the source
  bool is_normalised = false;  ///< `text` is not the source's own

  /// "byte 12" for a part of `text`; "byte 12 or later" if it was changed.
  std::string byte_of(std::string_view part) const {
    const std::less_equal<> in_order;
    const bool inside = in_order(text.data(), part.data()) && in_order(part.data(), text.data() + text.size());
    if (is_normalised || !inside) return fmt::format("byte {} or later", offset);
    return fmt::format("byte {}", offset + static_cast<std::size_t>(part.data() - text.data()));
  }
};

}  // namespace weft::language_model

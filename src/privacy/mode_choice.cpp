// SPDX-License-Identifier: Apache-2.0
#include "privacy/mode_choice.hpp"

#include <fmt/format.h>

#include "base/format.hpp"

namespace weft::privacy {

Mode ModeChoice::chosen() const {
  for (const auto& [mode, needed] : bytes)
    if (needed <= limit) return mode;
  return bytes.back().first;
}

std::string ModeChoice::text(const Settings& given) const {
  const bool automatic = given.mode == Mode::automatic;
  std::string text = fmt::format("  clipping: {}{}\n", to_text(automatic ? chosen() : given.mode),
                                 automatic ? fmt::format(" ({})", reason) : "");
  for (const auto& [mode, needed] : bytes)
    text += fmt::format("    {:<32}{:>14}\n", "on the device with " + name_of(mode), format::binary_bytes_text(needed));
  return text;
}

const char* to_text(Mode mode) {
  switch (mode) {
    case Mode::two_pass:
      return "two_pass, a second backward pass";
    case Mode::materialise:
      return "materialise, gradients of records in bf16";
    case Mode::book_keeping:
    case Mode::automatic:
      break;
  }
  return "book_keeping, rows are kept";
}

std::string name_of(Mode mode) {
  const std::string text = to_text(mode);
  return text.substr(0, text.find(','));
}

}  // namespace weft::privacy

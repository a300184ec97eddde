// SPDX-License-Identifier: Apache-2.0
// The alphabet in which GPT-2 writes bytes as printable characters, "Ġ" for a space.
#pragma once

#include <string>
#include <string_view>

namespace weft::language_model {

std::string to_alphabet(std::string_view bytes);
/// Converts from the alphabet to bytes. False for a text with other characters.
bool from_alphabet(std::string_view text, std::string& bytes);

}  // namespace weft::language_model

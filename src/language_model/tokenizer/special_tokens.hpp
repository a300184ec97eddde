// SPDX-License-Identifier: Apache-2.0
// Special tokens of the files next to a tokenizer.json, and the files that an export copies next to its own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace weft::language_model {

struct SpecialTokens {
  std::vector<std::uint32_t> begin, end;     ///< added to a text by the post-processor of a tokenizer.json
  std::vector<std::uint32_t> ends;           ///< each ends a text that is written
  std::map<std::string, std::string> files;  ///< tokenizer_config.json and others of other programs, by name: contents
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// Encoding with several threads. Long texts are cut where the tokeniser gives the same ids with and without the cut, so
// that the ids are those of Tokenizer::encode.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::language_model {

/// The ids of each document. `documents` are parts of `text`, whose name is `source`. Throws what Tokenizer::encode
/// throws for the first document that cannot be encoded. `part_bytes`: about what one thread takes at a time.
std::vector<std::vector<std::uint32_t>> encode_parallel(const Tokenizer&, std::string_view text,
                                                        std::span<const std::string_view> documents,
                                                        std::string_view source, int n_threads,
                                                        std::size_t part_bytes = std::size_t{1} << 20);

}  // namespace weft::language_model

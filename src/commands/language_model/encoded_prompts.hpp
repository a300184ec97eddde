// SPDX-License-Identifier: Apache-2.0
//
// The prompts that a command line gives to a language model.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "language_model/tokenizer/tokenizer.hpp"

namespace weft::commands {

/// A prompt, and where it comes from, for messages.
struct Prompt {
  std::string text, source;
  bool rendered = false;  ///< by a chat template, which has the symbols that begin a text
  std::vector<std::uint32_t> ids = {};
};

/// The texts of --prompt, or those in the file of --prompts, with their ids: 1 to `longest`. context: what has that
/// length. Throws Error(usage) or, for a file and prompts without a token, Error(data).
std::vector<Prompt> encoded_prompts(std::span<const std::string> texts, const std::string& file,
                                    const language_model::Tokenizer&, std::int64_t longest, const char* context);

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
//
// The text that a command applies a language model to.
#pragma once

#include <string>
#include <vector>

#include "commands/language_model/loaded.hpp"

namespace weft::commands {

struct Texts {
  std::vector<dataset::TokenSet> sets;
  std::string names;  ///< for records: paths, separated by commas
  std::string split;  ///< "train" or "validation" of the run; "" for files of the command line
};

/// Of a run: the part of the training text that it trained on, or the part that it held out. Throws a collective
/// Error(data) if the text is another one now. Collective.
dataset::TokenSet training_text(const LoadedLanguageModel&, bool held_out, const parallel::World&);

/// The files of --text; without it the run's training or validation data, as --split says. A text file is one document
/// and ends with the end-of-text symbol, if the tokeniser has one. Collective.
Texts load_texts(const Request&, const LoadedLanguageModel&, const parallel::World&);

}  // namespace weft::commands

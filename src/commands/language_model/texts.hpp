// SPDX-License-Identifier: Apache-2.0
//
// The text that a command applies a language model to.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "commands/language_model/opened.hpp"
#include "language_model/tokenizer/corpus.hpp"

namespace weft::commands {

struct Texts {
  std::vector<dataset::TokenSet> sets;
  std::string names;  ///< for the run record: paths, separated by commas
  std::string split;  ///< "train" or "validation" of the run; "" for files of the command line
};

/// The training text of a run: the part that it trained on, or the part that it held out. Throws a collective
/// Error(data) if the text is another one now. Collective.
dataset::TokenSet training_text(const OpenedModel&, const std::optional<language_model::Tokenizer>&, bool held_out,
                                const parallel::World&);

/// The text that a command line asks for.
struct TextChoice {
  std::vector<std::string> files;       ///< empty: the text of the run
  std::string split;                    ///< split of the run: "", "train" or "validation"
  std::string option = "--text FILES";  ///< how files are given, for messages
};

/// The files; without them the run's training or validation data. A text file is one document and ends with the
/// end-of-text symbol, if the tokeniser has one; each row of JSON Lines is one. Collective.
Texts load_texts(const TextChoice&, const OpenedModel&, const std::optional<language_model::Tokenizer>&,
                 const parallel::World&);

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
//
// Prompts of weft lm polychromic: the lines of a file, or pieces of a text at random places. Which prompt has a number
// depends on the seed, the batch and the number alone, so it is the same on any number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "language_model/tokenizer/corpus.hpp"
#include "polychromic/polychromic_settings.hpp"

namespace weft::polychromic {

struct Prompt {
  std::string id;                                 ///< "FILE:LINE", or the place in the text
  std::string text, reference;                    ///< reference: the answer that is right; "": none is known
  std::vector<std::uint32_t> ids;                 ///< at least one
  std::vector<std::uint32_t> reference_ids = {};  ///< for the reward reference_likelihood
};

/// The prompts of polychromic.prompts_file, which rank 0 reads. Collective; throws as Prompts.
std::vector<Prompt> read_prompts(const Settings&, const language_model::Tokenizer&, const parallel::World&);

class Prompts {
 public:
  /// The corpus has a tokeniser and must outlive the object. Reads the file on rank 0. Collective; throws a collective
  /// Error(usage) if there is no such file, Error(data) with file and line.
  Prompts(const Settings&, const language_model::Corpus&, std::uint64_t seed, const parallel::World&);

  /// Prompt `number` of batch `batch`, from 0: the lines of the file in turn, or a piece of the training text.
  Prompt training(std::int64_t batch, std::int64_t number) const;
  /// Number of prompts that are measured: evaluation_prompts, or as many as there are.
  std::int64_t n_evaluation() const { return n_evaluation_; }
  /// Evaluation prompt `number`: one of the first lines of the file, or a piece of the validation text.
  Prompt evaluation(std::int64_t number) const;
  /// Number of tokens of the tokeniser.
  std::int64_t vocabulary() const { return corpus_.tokenizer->vocabulary_size(); }
  /// Length in tokens of the longest prompt.
  std::int64_t longest() const { return longest_; }
  /// Length in tokens of the longest prompt with its reference.
  std::int64_t longest_with_reference() const;

 private:
  Prompt piece(const dataset::TokenSet&, std::uint64_t batch, std::int64_t number) const;

  const Settings settings_;
  const language_model::Corpus& corpus_;
  const std::uint64_t seed_;
  std::vector<Prompt> lines_;  // of the file; empty: prompts are cut
  std::int64_t n_evaluation_ = 0, longest_ = 0;
};

}  // namespace weft::polychromic

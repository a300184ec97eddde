// SPDX-License-Identifier: Apache-2.0
//
// The work of the answers of polychromic training, for --profile (language_model/run/pass_work.hpp).
#pragma once

#include <cstdint>

#include "language_model/blocks/architecture.hpp"
#include "language_model/settings/configuration.hpp"
#include "run/profile.hpp"

namespace weft::polychromic {

/// The answers of a rank's batch, and how often they are used.
struct AnswerWork {
  std::int64_t prompts = 0;        ///< on this rank
  std::int64_t samples = 0;        ///< answers to each
  std::int64_t prompt_tokens = 0;  ///< mean over the prompts
  std::int64_t answer_tokens = 0;  ///< mean over the answers
  double drawn = 0;                ///< batches per step
  double embedded = 0;             ///< batches per step that pass the frozen model: embeddings, likelihoods
  double scored = 0;               ///< forward passes over a batch per step, of the trained and of the frozen model
  double trained = 0;              ///< forward and backward passes over a batch per step
};

/// The bytes of the phases that answers add to a step, at least: every answer has the mean length.
run::PhaseBytes answer_bytes(const AnswerWork&, const language_model::Configuration&,
                             const language_model::Architecture&);

}  // namespace weft::polychromic

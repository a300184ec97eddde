// SPDX-License-Identifier: Apache-2.0
//
// The work of a language model's step, counted: the bytes that each phase must move and the operations of its products.
// The only place of these formulas; `weft benchmark` and --profile compare measured times with them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "language_model/blocks/model_parameters.hpp"
#include "language_model/generation/generator.hpp"
#include "run/profile.hpp"

namespace weft::language_model {

/// Phases that both passes have: weft benchmark times them by pass (run::Timers::split).
std::vector<std::string> phases_of_both_passes();

/// Work of one phase on one rank, by its name in the timers ("products", or "products, forward" and "products,
/// backward"); zero for phases without such work. What is computed again for the backward pass counts to it.
run::Work work_of(std::string_view phase, const Configuration&, const Architecture&);

/// The bytes of every phase of a step, for --profile. by_pass: phases of both passes under their two names.
run::PhaseBytes phase_bytes(const Configuration&, const Architecture&, bool by_pass = false);

/// The answers of a rank's batch of polychromic training, and how often they are used.
struct AnswerWork {
  std::int64_t prompts = 0;        ///< on this rank
  std::int64_t samples = 0;        ///< answers to each
  std::int64_t prompt_tokens = 0;  ///< mean over the prompts
  std::int64_t answer_tokens = 0;  ///< mean over the answers
  double drawn = 0;                ///< batches per step
  double scored = 0;               ///< forward passes over a batch per step, of the trained and of the frozen model
  double trained = 0;              ///< forward and backward passes over a batch per step
};

/// The bytes of the phases that answers add to a step, at least: every answer has the mean length.
run::PhaseBytes answer_bytes(const AnswerWork&, const Configuration&, const Architecture&);

/// The work of a phase of a generation. Per step the weights are read once, and per sequence the keys and values of all
/// positions so far.
run::Work generation_work(std::string_view phase, const Configuration&, const GenerationSettings&);

}  // namespace weft::language_model

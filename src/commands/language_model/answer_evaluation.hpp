// SPDX-License-Identifier: Apache-2.0
//
// Answers of a language model to prompts: weft lm evaluate --answers.
#pragma once

#include "commands/language_model/loaded_language_model.hpp"
#include "polychromic/answer_measures.hpp"

namespace weft::commands {

/// Draws answers to each prompt of polychromic.prompts_file, and measures them: rewards but
/// "likelihood", pass@k, diversity of their tokens and, with polychromic.embedder, of their embeddings. Groups of ranks
/// divide the prompts. The configuration is that of the model, with the prompts and the number of answers. Collective.
/// Throws, known to all ranks, Error(usage) or Error(data).
polychromic::AnswerMeasures measure_answers(const LoadedLanguageModel&, polychromic::Configuration,
                                            const parallel::World&);

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
//
// Generation with a cache of keys and values for weft benchmark: a step writes benchmark.generate_tokens tokens for
// each of benchmark.generate_rows sequences, prompts included in its time.
#pragma once

#include <memory>

#include "bench/language_model/language_input.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/run/memory_plan.hpp"
#include "parallel/grid.hpp"

namespace weft::bench {

/// Why the case cannot be measured; "" if it can.
std::string generation_case_obstacle(const language_model::Configuration&, const LanguageSettings&);

/// architecture: of the part of a rank.
language_model::GenerationSettings generation_case(const language_model::Configuration&, const LanguageSettings&,
                                                   const language_model::Architecture&, kernels::Backend);

/// The memory of the case: weights in the type of optimizer.state, activations, cache.
language_model::Plan generation_plan(const language_model::Configuration&, const LanguageSettings&,
                                     const language_model::Architecture&);

/// Random weights, random prompts. The grid must outlive the subject.
std::unique_ptr<BenchmarkSubject> generation_subject(const language_model::Configuration&, const LanguageSettings&,
                                                     const language_model::Architecture&, const parallel::Grid&,
                                                     const kernels::Execution&);

}  // namespace weft::bench

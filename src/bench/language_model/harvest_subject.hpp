// SPDX-License-Identifier: Apache-2.0
//
// Collecting the rows of MLPs for weft benchmark: a step is what weft lm harvest does for data.batch_tokens ids before
// it writes, in forward passes of data.micro_tokens ids.
#pragma once

#include <memory>

#include "bench/language_model/language_input.hpp"
#include "language_model/run/memory_plan.hpp"
#include "parallel/grid.hpp"

namespace weft::bench {

/// The memory of the case: weights in the type of optimizer.state, activations, collected rows.
language_model::Plan harvest_plan(const language_model::Configuration&, const LanguageSettings&,
                                  const language_model::Architecture&);

/// Random weights, random ids. The grid must outlive the subject.
std::unique_ptr<BenchmarkSubject> harvest_subject(const language_model::Configuration&, const LanguageSettings&,
                                                  const language_model::Architecture&, const parallel::Grid&,
                                                  const kernels::Execution&);

}  // namespace weft::bench

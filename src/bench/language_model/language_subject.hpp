// SPDX-License-Identifier: Apache-2.0
//
// A language model with batches in memory, for weft benchmark: the step of weft lm train.
#pragma once

#include <memory>
#include <string>

#include "bench/language_model/language_settings.hpp"
#include "language_model/plan.hpp"
#include "parallel/grid.hpp"

namespace weft::bench {

/// Why a case cannot be measured on this machine, "" if it can. `dry`: the device was not started. Collective.
std::string obstacle(const language_model::Configuration&, const LanguageSettings&, const parallel::World&, bool dry);

/// Throws a collective Error if benchmark.data cannot be read or has ids beyond benchmark.vocabulary. Collective.
void check_data(const language_model::Configuration&, const LanguageSettings&, const parallel::World&);

/// The memory of a case, and a line about it. They need no device.
language_model::Plan plan(const language_model::Configuration&, const LanguageSettings&);
std::string plan_text(const language_model::Configuration&, const LanguageSettings&);

/// Operations per token of forward and backward pass, without recomputation.
ModelFlops model_flops(const language_model::Architecture&, std::int64_t length);

/// Makes the batches. `execution`: that of the runtime; the backend is the one of the configuration. The grid must
/// outlive the subject.
std::unique_ptr<BenchmarkSubject> language_subject(const language_model::Configuration&, const LanguageSettings&,
                                                   const parallel::Grid&, const kernels::Execution&);

}  // namespace weft::bench

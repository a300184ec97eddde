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

/// Why a case cannot be measured whatever the machine; "" if it can.
std::string obstacle(const language_model::Configuration&, const LanguageSettings&);

/// Throws a collective Error if benchmark.data cannot be read or has ids beyond benchmark.vocabulary. Collective.
void check_data(const language_model::Configuration&, const LanguageSettings&, const parallel::World&);

/// The memory of a case. Needs no device.
language_model::Plan plan(const language_model::Configuration&, const LanguageSettings&);

/// Makes the batches. `execution`: that of the runtime; the backend is the one of the configuration. The grid must
/// outlive the subject.
std::unique_ptr<BenchmarkSubject> language_subject(const language_model::Configuration&, const LanguageSettings&,
                                                   const parallel::Grid&, const kernels::Execution&);

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
//
// A language model with batches in memory, for weft benchmark: the step of weft lm train.
#pragma once

#include <memory>
#include <string>

#include "language_model/benchmark/settings.hpp"
#include "language_model/plan.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// Why a case cannot be measured whatever the machine; "" if it can.
std::string obstacle(const Configuration&, const BenchmarkSettings&);

/// Throws a collective Error if benchmark.data cannot be read or has ids beyond benchmark.vocabulary. Collective.
void check_data(const Configuration&, const BenchmarkSettings&, const parallel::World&);

/// The memory of a case. Needs no device.
Plan plan(const Configuration&, const BenchmarkSettings&);

/// Makes the batches. `execution`: that of the runtime; the backend is the one of the configuration. The grid must
/// outlive the subject.
std::unique_ptr<training::BenchmarkSubject> benchmark_subject(const Configuration&, const BenchmarkSettings&,
                                                              const parallel::Grid&, const kernels::Execution&);

}  // namespace weft::language_model

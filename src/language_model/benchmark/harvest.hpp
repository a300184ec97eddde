// SPDX-License-Identifier: Apache-2.0
//
// Recording of MLPs for weft benchmark: a step is what weft lm harvest does for data.batch_tokens ids before it writes,
// in forward passes of data.micro_tokens ids.
#pragma once

#include <memory>

#include "language_model/benchmark/settings.hpp"
#include "language_model/plan.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// The memory of the case: weights in the type of optimizer.state, activations, recorded rows.
Plan harvest_plan(const Configuration&, const BenchmarkSettings&, const Architecture&);

/// Random weights, random ids. The grid must outlive the subject.
std::unique_ptr<training::BenchmarkSubject> harvest_subject(const Configuration&, const BenchmarkSettings&,
                                                            const Architecture&, const parallel::Grid&,
                                                            const kernels::Execution&);

}  // namespace weft::language_model

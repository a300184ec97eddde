// SPDX-License-Identifier: Apache-2.0
//
// Generation with a cache of keys and values for weft benchmark: a step writes benchmark.generate_tokens tokens for
// each of benchmark.generate_rows sequences, prompts included in its time.
#pragma once

#include <memory>

#include "language_model/benchmark/settings.hpp"
#include "language_model/generation/generator.hpp"
#include "language_model/plan.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// Why the case cannot be measured; "" if it can.
std::string generation_case_obstacle(const Configuration&, const BenchmarkSettings&);

GenerationSettings generation_case(const Configuration&, const BenchmarkSettings&, const Architecture&,
                                   kernels::Backend);

/// The memory of the case: weights in the type of optimizer.state, activations, cache.
Plan generation_plan(const Configuration&, const BenchmarkSettings&, const Architecture&);

/// The bytes and operations of a phase. Per step of generation the weights are read once, and per sequence the keys and
/// values of all positions so far.
training::Work generation_work(std::string_view phase, const Configuration&, const GenerationSettings&);

/// Random weights, random prompts. The grid must outlive the subject.
std::unique_ptr<training::BenchmarkSubject> generation_subject(const Configuration&, const BenchmarkSettings&,
                                                               const Architecture&, const parallel::Grid&,
                                                               const kernels::Execution&);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// The work of a language model's step, counted: the bytes that each phase must move and the operations of its products.
// The only place of these formulas; `weft benchmark` and --profile compare measured times with them.
#pragma once

#include <string_view>

#include "language_model/architecture.hpp"
#include "training/benchmark.hpp"

namespace weft::language_model {

/// Of one phase on one rank, by its name in the timers; zero for phases without such work.
training::Work work_of(std::string_view phase, const Configuration&, const Architecture&);

/// The bytes of every phase of a step, for --profile.
training::PhaseBytes phase_bytes(const Configuration&, const Architecture&);

/// Operations per token of forward and backward pass, without recomputation.
training::ModelFlops model_flops(const Architecture&, std::int64_t length);

}  // namespace weft::language_model

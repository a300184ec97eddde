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

/// The work of a phase of a generation. Per step the weights are read once, and per sequence the keys and values of all
/// positions so far.
run::Work generation_work(std::string_view phase, const Configuration&, const GenerationSettings&);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// Cases of `weft benchmark` with a name instead of overrides. A toggle is one optimisation; it is on or off by one key
// each. The baseline has all of them off; a name is a toggle, several joined by " + ", or one of those below.
//
//   baseline, baseline again   none, measured twice: their difference is the drift of the machine
//   A                          graphs + accumulation + bf16
//   B                          flash attention + recompute blocks + 8-bit state
//   safe                       the defaults of the program: flash attention + chunked head + graphs
//   all                        every toggle but the alternatives to one that is on
//   input                      the input as it is
//
// All but "input" take benchmark.batch_tokens per step; "accumulation" makes four micro-batches of them.
#pragma once

#include <string>
#include <vector>

#include "bench/benchmark.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::bench {

/// The case that all others are compared with.
inline constexpr std::string_view kBaseline = "baseline";

/// Every toggle alone, the combinations above and "8-bit state + recompute blocks".
std::vector<std::string> default_cases();

/// Gives a case without overrides those that its name stands for. Toggles that this program or the input
/// does not have are left out of A, B, safe and all; any other case with one of them is not measured. Throws a
/// collective Error(usage) for a name that stands for nothing. `batch_tokens`: benchmark.batch_tokens.
void resolve(const language_model::Configuration&, std::int64_t batch_tokens, BenchmarkCase&);

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
//
// What weft lm polychromic adds to the page of its run: measures and samples of answers before and after the training,
// and the time of its stages.
#pragma once

#include <optional>

#include "commands/report/page.hpp"

namespace weft::commands {

/// None: the run has no answers.
std::optional<report::Section> answers_section(const RunFacts&);

/// Of the metrics of answers; empty for other runs.
std::vector<CurveStyle> answer_curves(const RunFacts&);

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
//
// Phases of a process (watchdog.hpp) as they begin, for --verbose.
#pragma once

#include <string_view>

namespace weft::parallel {

/// Called with each later phase, on the thread that enters it; nullptr: none.
void observe_phases(void (*observer)(std::string_view phase));

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace weft {

/// Clock for durations: never set back.
using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace weft

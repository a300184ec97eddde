// SPDX-License-Identifier: Apache-2.0
//
// What privacy.mode = "auto" means: the first mode, in the order of their speed, whose planned memory fits. From sizes
// alone: the same on all ranks and after a restart.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "privacy/privacy_settings.hpp"

namespace weft::privacy {

struct ModeChoice {
  std::vector<std::pair<Mode, std::int64_t>> bytes;  ///< device memory of a run with each mode, the fastest mode first
  std::int64_t limit = 0;                            ///< bytes that the run may take
  std::string reason;                                ///< why the first mode within the limit is taken, for the plan

  /// The first mode within the limit; the last one if there is none.
  Mode chosen() const;
  /// Text for the plan of a run: the mode, the reason, and the memory of each mode.
  std::string text(const Settings& given) const;
};

/// Text of a mode: "two_pass, a second backward pass". Not for Mode::automatic.
const char* to_text(Mode);
/// Name of a mode: "two_pass".
std::string name_of(Mode);

}  // namespace weft::privacy

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "commands/report/page.hpp"

namespace weft::commands {

/// Of a transcoder: validation by layer, the writes between layers, recovery of planted features.
FamilyPart transcoder_part(const RunFacts&);

}  // namespace weft::commands

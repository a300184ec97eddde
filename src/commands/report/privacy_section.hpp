// SPDX-License-Identifier: Apache-2.0
//
// What the page of `weft report` shows of private training, whatever the model.
#pragma once

#include <vector>

#include "commands/report/page.hpp"

namespace weft::commands {

/// The guarantee of a private run; nothing for others.
std::vector<report::Section> privacy_sections(const RunFacts&);

}  // namespace weft::commands

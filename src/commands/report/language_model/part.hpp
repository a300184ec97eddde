// SPDX-License-Identifier: Apache-2.0
//
// What the page of `weft report` shows of a language model.
#pragma once

#include "commands/report/page.hpp"

namespace weft::commands {

FamilyPart language_model_part(const RunFacts&);

}  // namespace weft::commands

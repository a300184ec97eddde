// SPDX-License-Identifier: Apache-2.0
//
// Weights in the files of another program, as the commands describe them with --json.
#pragma once

#include "base/json.hpp"
#include "interchange/formats.hpp"

namespace weft::commands {

/// Format, sizes and origin.
Json document_of(const interchange::Opened& opened);

}  // namespace weft::commands

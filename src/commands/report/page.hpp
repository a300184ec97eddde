// SPDX-License-Identifier: Apache-2.0
//
// The page of `weft report`: facts as HTML.
#pragma once

#include <string>

#include "commands/report/facts.hpp"

namespace weft::commands {

/// One self-contained document, HTML and well-formed XML at once: inline style and SVG, no script, nothing fetched.
/// What is missing is said where it would stand.
std::string report_page(const RunFacts&);

}  // namespace weft::commands

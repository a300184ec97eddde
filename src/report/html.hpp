// SPDX-License-Identifier: Apache-2.0
//
// Escaping for HTML and SVG. All text that comes from files goes through `escaped`.
#pragma once

#include <string>
#include <string_view>

namespace weft::report {

/// Safe inside an element or a quoted attribute of HTML and XML: & < > " ' as entities; invalid UTF-8 and control
/// characters, which XML forbids, as U+FFFD. Line feeds and tabs are kept.
std::string escaped(std::string_view text);

}  // namespace weft::report

// SPDX-License-Identifier: Apache-2.0
//
// The skeleton and style of a report page: page.html, embedded when the program is built. Values go where it has
// {{name}} (page.cpp).
#pragma once

namespace weft::report {

extern const char* const page_template;

}  // namespace weft::report

// SPDX-License-Identifier: Apache-2.0
//
// The script of features.html: browser.js, embedded when the program is built.
#pragma once

namespace weft::transcoder {

extern const char* const browser_script;

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Text and numbers as they stand in a page for people. What comes from files goes through `escaped`, always.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft::report {

/// Fit for an element or a quoted attribute of HTML and XML: & < > " ' as entities; bytes that are no UTF-8 and control
/// characters, which XML forbids, as U+FFFD. Line feeds and tabs stay.
std::string escaped(std::string_view text);

/// Three significant digits: "0.0412", "12.3", "1,230", "4.1e-07"; "not finite" for what is not.
std::string short_number(double value);

/// "12.6 MB", "1.24 GB": powers of ten, as disks are sold.
std::string bytes_text(double bytes);

}  // namespace weft::report

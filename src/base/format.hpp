// SPDX-License-Identifier: Apache-2.0
//
// Numbers, durations and amounts of memory as text for people: log, messages, tables, pages.
#pragma once

#include <cstdint>
#include <string>

namespace weft::format {

/// "51,900": thousands separated by commas.
std::string grouped(std::int64_t number);

/// Three significant digits: "0.0412", "12.3", "1,230", "4.1e-07"; "not finite" for infinities and NaN.
std::string short_number(double value);

/// "0:12:34" (hours:minutes:seconds); "?" for a negative duration and for one beyond a million hours.
std::string duration(double seconds);

/// Memory, in powers of 1024: "1.50 GiB", "312 KiB".
std::string binary_bytes_text(std::int64_t bytes);

/// Files and disks, in powers of 1000: "12.6 MB", "1.24 GB".
std::string decimal_bytes_text(double bytes);

}  // namespace weft::format

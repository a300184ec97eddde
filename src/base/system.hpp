// SPDX-License-Identifier: Apache-2.0
//
// What the operating system provides: the name of this host, random names.
#pragma once

#include <cstddef>
#include <string>

namespace weft {

std::string host_name();

/// Random hexadecimal digits, different in every call of every process; for names, not for results. Throws
/// Error(internal).
std::string random_hex(std::size_t digits);

}  // namespace weft

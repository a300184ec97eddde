// SPDX-License-Identifier: Apache-2.0
//
// What the operating system provides: the name of this host, its CPUs, random names.
#pragma once

#include <cstddef>
#include <string>

namespace weft {

std::string host_name();

/// CPUs that the affinity mask of this thread allows, at least 1. std::thread::hardware_concurrency counts those of the
/// machine.
int usable_cpus();

/// Random hexadecimal digits, different in every call of every process; for names, not for results. Throws
/// Error(internal).
std::string random_hex(std::size_t digits);

}  // namespace weft

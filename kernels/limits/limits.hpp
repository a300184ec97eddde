// SPDX-License-Identifier: Apache-2.0
//
// Measured limits of the machine, for the percentages of `weft benchmark`. The dense product is timed with encode_tile.
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// Copies `from` to `to` (equal sizes) with all threads, at the speed of the memory: on the host with non-temporal
/// stores if the C library uses them. Moves 2 * size bytes.
void copy_memory(const Execution&, Array<const std::byte> from, Array<std::byte> to);

}  // namespace weft::kernels

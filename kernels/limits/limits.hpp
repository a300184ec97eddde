// SPDX-License-Identifier: Apache-2.0
//
// What the machine can do, for the percentages of `weft benchmark`. The dense product is timed with encode_tile itself.
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// to = from (equally long), by all threads of the step, as fast as the memory allows: on the host past the caches
/// where the C library does so. Moves 2 * size bytes.
void copy_memory(const Execution&, Array<const std::byte> from, Array<std::byte> to);

}  // namespace weft::kernels

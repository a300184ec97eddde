// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark --tune: writes the algorithm table that device.algorithms names (run/algorithms.hpp).
#pragma once

#include <filesystem>

#include "kernels/execution.hpp"

namespace weft::bench {

/// Times the algorithms that the library proposes for the products that this process has made, and both implementations
/// of its attention, and writes the fastest of each. Synchronises.
void tune_algorithms(const kernels::Execution&, const std::filesystem::path& file);

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
//
// Which algorithm the GPU's dense library uses for products, and which implementation computes attention. Training
// never chooses by timing, because then two runs could differ: it takes what a file records for the shape, the GPU and
// the version of the library (device.algorithms), or else the first algorithm that the library proposes, and the own
// kernels of attention. `weft benchmark --tune` writes such a file. Without CUDA there is nothing to choose.
#pragma once

#include <filesystem>
#include <string>

#include "kernels/execution.hpp"
#include "parallel/world.hpp"
#include "report/json.hpp"

namespace weft::training {

/// Reads `path` (device.algorithms), if it is not empty. Before the first product. Throws a collective Error(usage) if
/// the file cannot be read. A resumed run keeps the algorithms of its checkpoint, also if the file has changed:
/// `manifest_extra` is Manifest::extra of that checkpoint, "" for a fresh run.
void use_recorded_algorithms(const std::string& path, const parallel::World&, const std::string& manifest_extra = "");

/// Algorithms that this process has used so far, for the run record: [] without CUDA.
report::Json algorithms_in_use();

/// Times the algorithms that the library proposes for the products that this process has made, and both implementations
/// of its attention, and writes the fastest of each. Synchronises.
void tune_algorithms(const kernels::Execution&, const std::filesystem::path& file);

}  // namespace weft::training

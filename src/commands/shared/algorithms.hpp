// SPDX-License-Identifier: Apache-2.0
//
// Which algorithm the GPU's dense library uses for the encoder's products. Training never chooses by timing, because
// then two runs could differ: it takes what a file records for the shape, the GPU and the library's version
// (device.algorithms), or else the library's first proposal. `weft benchmark --tune` writes such a file. Without CUDA
// there is nothing to choose.
#pragma once

#include <filesystem>

#include "parallel/world.hpp"
#include "report/json.hpp"
#include "transcoder/settings.hpp"

namespace weft::commands {

/// Reads device.algorithms, if it is set. Before the first product. Throws a collective Error(usage) when the file
/// cannot be read. A run that goes on keeps the algorithms of its checkpoint, whatever the file says by now:
/// `manifest_extra` is Manifest::extra of that checkpoint, "" for a fresh run.
void use_recorded_algorithms(const transcoder::Configuration&, const parallel::World&,
                             const std::string& manifest_extra = "");

/// Those of this process so far, for the record of a run: [] without CUDA.
report::Json algorithms_in_use();

/// Times the library's proposals for the products that this process has made and writes the fastest of each.
/// Synchronises.
void tune_algorithms(const kernels::Execution&, const std::filesystem::path& file);

}  // namespace weft::commands

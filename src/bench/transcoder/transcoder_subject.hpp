// SPDX-License-Identifier: Apache-2.0
//
// A transcoder for weft benchmark: the sparse step of weft train, with the baselines that the settings choose, or the
// dense formulation that it is compared with.
#pragma once

#include <memory>
#include <string>

#include "bench/benchmark.hpp"
#include "bench/transcoder/streamed_batches.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "parallel/grid.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::bench {

/// Why this formulation cannot run on this machine; "" if it can.
std::string obstacle(const transcoder::Configuration&, const TranscoderSettings&, const parallel::World&);

/// `execution`: that of the runtime; the backend is the one of the configuration. `data`: null for batches in memory,
/// which it makes. World and grid must outlive the subject. Collective.
std::unique_ptr<BenchmarkSubject> transcoder_subject(const transcoder::Configuration&, const TranscoderSettings&,
                                                     const parallel::World&, const parallel::Grid&,
                                                     const kernels::Execution&, int n_threads,
                                                     std::unique_ptr<TrainingData> data);

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
//
// The statistics that normalise a run are part of its state: a resumed run uses the same bits, even if the files have
// changed.
#pragma once

#include "checkpoint/registry.hpp"
#include "checkpoint/resume.hpp"
#include "dataset/activations/statistics.hpp"

namespace weft::transcoder {

/// Registers the statistics (statistics/inputs_mean, ...; fp64, replicated). They must outlive the registry.
void add_statistics(checkpoint::Registry&, dataset::Statistics&, int world_rank);

/// The statistics of a checkpoint, for data of this shape. Collective.
dataset::Statistics load_statistics(const parallel::World&, const checkpoint::Found&, std::int64_t n_layers,
                                    std::int64_t d_model, const kernels::Execution&);

}  // namespace weft::transcoder

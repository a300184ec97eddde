// SPDX-License-Identifier: Apache-2.0
//
// The statistics that normalise a run are part of its state: a resumed run uses the same bits, even if the files have
// changed.
#pragma once

#include <string>

#include "checkpoint/registry.hpp"
#include "checkpoint/resume.hpp"
#include "dataset/activations/statistics.hpp"

namespace weft::transcoder {

/// Registers the statistics (statistics/inputs_mean, ...; fp64, replicated). They must outlive the registry.
void add_statistics(checkpoint::Registry&, dataset::Statistics&, int world_rank);

/// Loads the statistics of a checkpoint, for the dataset `data` of this shape. Throws a collective Error(data) if the
/// checkpoint is of a model of another shape. Collective.
dataset::Statistics load_statistics(const parallel::World&, const checkpoint::Found&, std::int64_t n_layers,
                                    std::int64_t d_model, const std::string& data, const kernels::Execution&);

}  // namespace weft::transcoder

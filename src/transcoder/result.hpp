// SPDX-License-Identifier: Apache-2.0
//
// Results of an evaluation: a table for the log and JSON for run.json.
#pragma once

#include <optional>
#include <string>

#include "dataset/activations/synthetic.hpp"
#include "report/json.hpp"
#include "transcoder/evaluation.hpp"

namespace weft::transcoder {

/// result.validation of run.json: arrays per layer, and their means as NAME_mean; null where a measure is not defined.
report::Json to_json(const EvaluationResult&);
report::Json to_json(const dataset::Recovery&);

/// One row per layer and one for the mean; "-" where a measure is not defined.
std::string to_table(const EvaluationResult&);

/// How many planted features the decoder has learned; nullopt if the dataset has no ground truth for it. Collective;
/// the result is on rank 0, zero on the others.
std::optional<dataset::Recovery> recovered(const dataset::Description&, const Model&, const NormalisationOnDevice&,
                                           const parallel::World&, const parallel::Grid&, const kernels::Execution&,
                                           int threads);

}  // namespace weft::transcoder

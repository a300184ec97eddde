// SPDX-License-Identifier: Apache-2.0
//
// What a run or an evaluation found, for people (a table in the log) and for programs (run.json).
#pragma once

#include <optional>
#include <string>

#include "dataset/activations/synthetic.hpp"
#include "report/json.hpp"
#include "transcoder/evaluation.hpp"
#include "transcoder/trainer.hpp"

namespace weft::commands {

/// result.validation of run.json: arrays per layer, and their means as NAME_mean.
report::Json to_json(const transcoder::EvaluationResult&);
report::Json to_json(const dataset::Recovery&);
/// result.train, and the body of a line of metrics.jsonl.
report::Json to_json(const transcoder::TrainingMetrics&);

/// One row a layer and one for the mean.
std::string to_table(const transcoder::EvaluationResult&);

/// How many planted features the decoder has learned; nothing when the dataset says nothing of its truth. Collective;
/// the result is on rank 0, elsewhere its fractions are 0.
std::optional<dataset::Recovery> recovered(const std::string& dataset_path, const transcoder::Model&,
                                           const transcoder::NormalisationOnDevice&, const parallel::World&,
                                           const parallel::Grid&, const kernels::Execution&, int threads);

}  // namespace weft::commands

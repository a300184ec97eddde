// SPDX-License-Identifier: Apache-2.0
//
// Results of an evaluation: a table for the log and JSON for run.json.
#pragma once

#include <optional>
#include <string>

#include "dataset/activations/synthetic.hpp"
#include "storage/json_file.hpp"
#include "transcoder/features/decoder_rows.hpp"
#include "transcoder/run/evaluation.hpp"

namespace weft::transcoder {

/// Formats result.validation of run.json: arrays per layer, their means as NAME_mean, and measures of all layers
/// together as NAME_pooled; null where a measure is not defined.
Json to_json(const EvaluationResult&);
/// Formats further members for evaluation.json: decoder_share [s][t], redundancy and redundant_fraction per layer.
Json to_json(const DecoderSummary&);
Json to_json(const dataset::Recovery&);

/// Formats a table with one line per layer and one for the mean; "-" where a measure is not defined.
std::string to_table(const EvaluationResult&);
/// Formats the measures of `weft evaluate` alone as several tables: fraction of variance unexplained, all layers
/// together, features by density, and the summary of the decoder rows.
std::string to_table(const EvaluationResult&, const DecoderSummary&);

/// Counts the planted features that the decoder has learned; nullopt if the dataset has no ground truth for it.
/// Collective; the result is on rank 0, zero on the others.
std::optional<dataset::Recovery> recovered(const dataset::Description&, const Model&, const NormalisationOnDevice&,
                                           const parallel::World&, const parallel::Grid&, const kernels::Execution&,
                                           int threads);

}  // namespace weft::transcoder

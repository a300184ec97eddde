// SPDX-License-Identifier: Apache-2.0
//
// The records of private training, and where the clipped sum of a private step comes from (privacy/clipping.hpp), by
// the memory that it takes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dataset/tokens/batches.hpp"
#include "kernels/execution.hpp"
#include "language_model/settings/configuration.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// The records of private training: disjoint segments of data.sequence + 1 ids, or documents, and the probability with
/// which each joins a step. Throws a collective Error(usage) if steps would have more records than there are.
struct PrivateRecords {
  std::int64_t count = 0;
  double expected = 0;  ///< records of a step
  double rate() const { return expected / static_cast<double>(count); }
};
PrivateRecords private_records(const Configuration&, const dataset::TokenSet& train);
/// With records that are segments.
PrivateRecords private_records(const Configuration&, std::int64_t train_tokens);
/// The documents, if records are documents or examples.
std::optional<dataset::DocumentRecords> document_records(const Configuration&, const dataset::TokenSet& train);

/// Steps of an epoch: after which all segments of the training data have been used once; of private training after
/// which each record is expected to have been used once.
double steps_per_epoch(const Configuration&, const dataset::Segments& train);

/// The configuration with the mode that privacy.mode = "auto" means: the first of materialise, book_keeping and
/// two_pass whose planned bytes fit (privacy/mode_choice.hpp).
Configuration with_clipping_mode(Configuration, const Architecture&, const parallel::GridShape&, kernels::Backend);

/// Lines for the plan of a run: the mode, and the device memory of the run with each one.
std::string clipping_text(const Configuration&, const Architecture&, const parallel::GridShape&, kernels::Backend);

}  // namespace weft::language_model

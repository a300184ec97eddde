// SPDX-License-Identifier: Apache-2.0
//
// The records of private training, steps on them, and where the clipped sum of a private step comes from
// (privacy/clipping.hpp), by the memory that it takes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "dataset/tokens/batches.hpp"
#include "kernels/execution.hpp"
#include "language_model/settings/configuration.hpp"
#include "language_model/step/language_trainer.hpp"
#include "parallel/grid.hpp"

namespace weft::language_model {

/// The records of private training: disjoint segments of data.sequence + 1 ids, or documents, or all documents of an
/// owner, and the probability with which each joins a step.
struct PrivateRecords {
  std::int64_t count = 0;
  double expected = 0;                                ///< records of a step
  std::optional<dataset::DocumentRecords> documents;  ///< if they are records
  double rate() const { return expected / static_cast<double>(count); }
};
/// Throws a collective Error(usage) if steps would have more records than there are; else as DocumentRecords.
PrivateRecords private_records(const Configuration&, const dataset::TokenSet& train);
/// With records that are segments.
PrivateRecords private_records(const Configuration&, std::int64_t train_tokens);

/// Throws a collective Error(usage) if a record of privacy.max_per_owner sequences does not fit a micro-batch.
void require_whole_records(const Configuration&);

/// A private step of `trainer` on these records of `train`, those of this rank. Collective.
void private_step(Trainer&, const PrivateRecords&, const dataset::TokenSet& train,
                  std::span<const std::int64_t> records);

/// Steps of an epoch: after which all segments of the training data have been used once; of private training after
/// which each record is expected to have been used once.
double steps_per_epoch(const Configuration&, const dataset::Segments& train);

/// The configuration with the mode that privacy.mode = "auto" means: the first of materialise, book_keeping and
/// two_pass whose planned bytes fit (privacy/mode_choice.hpp).
Configuration with_clipping_mode(Configuration, const Architecture&, const parallel::GridShape&, kernels::Backend);

/// Lines for the plan of a run: the mode, and the device memory of the run with each one.
std::string clipping_text(const Configuration&, const Architecture&, const parallel::GridShape&, kernels::Backend);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// What a training step shows: of one step, not of an interval, so that they are the same in a run that was interrupted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

/// Of the last step, before its update; by layer where they are vectors.
struct TrainingMetrics {
  double loss = 0;  ///< preset `weft`: sum over layers of the mean squared normalised error
  std::vector<double> layer_loss;
  /// Squared error over squared target, both standardised by the training set; NaN if the targets of the layer are
  /// constant.
  std::vector<double> nmse_standardised;
  std::vector<double> l0;                                  ///< active features per token
  double dead_fraction = 0;                                ///< features silent for transcoder.dead_window tokens
  double gradient_norm = 0;                                ///< of the last step, before clipping; 0 when not formed
  double sparsity_penalty = 0, preactivation_penalty = 0;  ///< with their coefficients; not contained in `loss`
  double auxiliary_loss = 0;                               ///< likewise, of dead features
  std::int64_t skipped = 0;                                ///< steps without update, since the start of the run

  double nmse_standardised_mean() const;
  double l0_mean() const;

  /// Active entries of the last step, of the features that a rank updates, over the ranks: features that fire often may
  /// lie on one rank, and the others wait for it.
  struct {
    double minimum = 0, mean = 0, maximum = 0;
  } entries_per_rank;
};

/// Mean of the values that are defined (not NaN); NaN if none is.
double mean_over_layers(const std::vector<double>& values);

/// What one rank adds to the metrics of a step.
struct MetricSums {
  explicit MetricSums(std::int64_t n_layers) : sums(static_cast<std::size_t>(4 * n_layers)) {}
  /// [4, L]: loss, squared standardised error, squared standardised target (own tokens), active entries (own features)
  std::vector<double> sums;
  double dead = 0;  ///< features
};
/// All but gradient_norm, penalties and skipped, over the ranks, for a batch of `n_tokens`. error_divisor: of the
/// squared errors in the loss. Collective.
TrainingMetrics reduce_metrics(const MetricSums&, const Shape&, std::int64_t n_tokens, double error_divisor,
                               const parallel::Communicator&);

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Metrics of a training step. They belong to one step, not to an interval, so that an interrupted run shows the same
// values.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/communicator.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

/// Metrics of the last step, before its update; vectors are by layer.
struct TrainingMetrics {
  double loss = 0;  ///< preset `weft`: sum over layers of the mean squared normalised error
  std::vector<double> layer_loss;
  /// Squared error over squared target, both standardised by the training set; NaN if the targets of the layer are
  /// constant.
  std::vector<double> nmse_standardised;
  std::vector<double> l0;                                  ///< active features per token
  double dead_fraction = 0;                                ///< features silent for transcoder.dead_window tokens
  double gradient_norm = 0;                                ///< norm before clipping; 0 when not formed
  double sparsity_penalty = 0, preactivation_penalty = 0;  ///< with their coefficients; not contained in `loss`
  double auxiliary_loss = 0;  ///< auxiliary loss of dead features with its coefficient; not contained in `loss`
  std::int64_t skipped = 0;   ///< steps without update, since the start of the run

  double nmse_standardised_mean() const;
  double l0_mean() const;

  /// Distribution over the ranks of the active entries of the features that a rank updates: if features that fire often
  /// lie on one rank, the others wait for it.
  struct {
    double minimum = 0, mean = 0, maximum = 0;
  } entries_per_rank;
};

/// Mean of the values that are defined (not NaN); NaN if none is.
double mean_over_layers(const std::vector<double>& values);

/// Contribution of one rank to the metrics of a step.
struct MetricSums {
  explicit MetricSums(std::int64_t n_layers) : sums(static_cast<std::size_t>(4 * n_layers)) {}
  /// Sums [4, L]: loss, squared standardised error, squared standardised target (own tokens), active entries (own
  /// features).
  std::vector<double> sums;
  double dead = 0;  ///< number of dead features
};
/// Reduces all metrics but gradient_norm, penalties and skipped over the ranks, for a batch of `n_tokens`.
/// error_divisor: divisor of the squared errors in the loss. Collective.
TrainingMetrics reduce_metrics(const MetricSums&, const Shape&, std::int64_t n_tokens, double error_divisor,
                               const parallel::Communicator&);

}  // namespace weft::transcoder

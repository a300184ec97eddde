// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/training_metrics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace weft::transcoder {
namespace {

double mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

double mean_over_layers(const std::vector<double>& values) {
  double sum = 0;
  int n = 0;
  for (const double value : values)
    if (!std::isnan(value)) {
      sum += value;
      ++n;
    }
  return n > 0 ? sum / n : std::numeric_limits<double>::quiet_NaN();
}

double TrainingMetrics::nmse_standardised_mean() const { return mean_over_layers(nmse_standardised); }
double TrainingMetrics::l0_mean() const { return mean(l0); }

TrainingMetrics reduce_metrics(const MetricSums& own, const Shape& shape, std::int64_t n_tokens, double error_divisor,
                               const parallel::Communicator& world) {
  const std::int64_t n = shape.n_layers;
  const double own_entries = std::accumulate(own.sums.begin() + 3 * n, own.sums.end(), 0.0);
  std::vector<double> entries(static_cast<std::size_t>(world.size()));
  world.all_gather(&own_entries, entries.data(), sizeof own_entries);
  std::vector<double> sums = own.sums;
  sums.push_back(own.dead);
  world.sum(std::span<double>(sums));

  TrainingMetrics metrics;
  const auto [fewest, most] = std::minmax_element(entries.begin(), entries.end());
  metrics.entries_per_rank = {*fewest, mean(entries), *most};
  const double tokens = static_cast<double>(n_tokens);
  for (std::size_t t = 0; t < static_cast<std::size_t>(n); ++t) {
    const auto at = [&](std::int64_t row) { return sums[static_cast<std::size_t>(row * n) + t]; };
    metrics.layer_loss.push_back(at(0) / error_divisor);
    metrics.nmse_standardised.push_back(at(2) > 0 ? at(1) / at(2) : std::numeric_limits<double>::quiet_NaN());
    metrics.l0.push_back(at(3) / tokens);
    metrics.loss += metrics.layer_loss.back();
  }
  metrics.dead_fraction = sums.back() / static_cast<double>(n * shape.n_features);
  return metrics;
}

}  // namespace weft::transcoder

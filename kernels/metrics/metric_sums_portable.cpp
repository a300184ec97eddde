// SPDX-License-Identifier: Apache-2.0
#include "kernels/metrics/metric_sums.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::portable {
namespace {

constexpr int kMetricColumns = 64;  // columns that one team sums over all tokens

struct DimensionScratch {
  double error[kMetricColumns], squared_error[kMetricColumns], target[kMetricColumns], squared_target[kMetricColumns];
  float y[kMetricColumns], reconstruction[kMetricColumns];
};

}  // namespace

void accumulate_dimensions(const Execution& execution, AnyMatrix y, AnyMatrix reconstruction, Array<const float> mean,
                           Array<const float> spread, Array<const float> pivot, DimensionSums sums) {
  const std::int64_t n_teams = (y.columns + kMetricColumns - 1) / kMetricColumns;
  for_teams(
      execution, "accumulate_dimensions", n_teams, sizeof(DimensionScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t column = team.league_rank() * std::int64_t{kMetricColumns};
        const int count = smaller(kMetricColumns, y.columns - column);
        DimensionScratch& sum = scratch<DimensionScratch>(team);
        const float* centre = mean.data + column;
        const float* factor = spread.data + column;
        const float* origin = pivot.data + column;
        for_columns(team, count,
                    [&](int c) { sum.error[c] = sum.squared_error[c] = sum.target[c] = sum.squared_target[c] = 0; });
        for (std::int64_t row = 0; row < y.rows; ++row) {
          const float* target = row_chunk(team, y, row, column, count, sum.y);
          const float* estimate = row_chunk(team, reconstruction, row, column, count, sum.reconstruction);
          for_columns(team, count, [&](int c) {
            const double value = target[c];
            const double error = value - (static_cast<double>(estimate[c]) * factor[c] + centre[c]);
            const double shifted = value - origin[c];
            sum.error[c] += error;
            sum.squared_error[c] += error * error;
            sum.target[c] += shifted;
            sum.squared_target[c] += shifted * shifted;
          });
        }
        for_columns(team, count, [&](int c) {
          sums.error[column + c] += sum.error[c];
          sums.squared_error[column + c] += sum.squared_error[c];
          sums.target[column + c] += sum.target[c];
          sums.squared_target[column + c] += sum.squared_target[c];
        });
      });
}

void accumulate_firing(const Execution& execution, const FeatureHits& hits, Array<std::int64_t> fired) {
  const std::int64_t* offsets = hits.offsets.data;
  for_all(
      execution, "accumulate_firing", fired.size,
      KOKKOS_LAMBDA(std::int64_t key) { fired[key] += offsets[key + 1] - offsets[key]; });
}

void advance_clocks(const Execution& execution, const FeatureHits& hits, std::int64_t tokens, const AdamStep* step,
                    Array<std::int64_t> tokens_since) {
  const std::int64_t* offsets = hits.offsets.data;
  for_all(
      execution, "advance_clocks", tokens_since.size, KOKKOS_LAMBDA(std::int64_t key) {
        if (step->withheld == 0) tokens_since[key] = offsets[key + 1] > offsets[key] ? 0 : tokens_since[key] + tokens;
      });
}

}  // namespace weft::kernels::portable

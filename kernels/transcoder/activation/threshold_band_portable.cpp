// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/activation/threshold_band.hpp"

namespace weft::kernels {

void threshold_band_bounds(const Execution& execution, const ThresholdBand& of_step, Array<const float> theta,
                           Array<float> bounds) {
  const ThresholdBand band = of_step;
  for_all(
      execution, "threshold_band_bounds", theta.size,
      KOKKOS_LAMBDA(std::int64_t i) { bounds[i] = threshold_band_bound(band.now(), theta[i]); });
}

void jump_activations(const Execution& execution, const JumpRule& of_form, const SparseActivations& listed,
                      Matrix<const float> theta, Array<float> value) {
  const JumpRule rule = of_form;
  const SparseActivations list = listed;
  for_all(
      execution, "jump_activations", list.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i >= list.row_offsets[list.n_tokens]) return;
        const std::int64_t layer = list.key[i] / list.n_features;
        const float z = list.value[i];
        value[i] = jump_is_active(rule, z, theta(layer, list.key[i] - layer * list.n_features)) ? z : 0.0f;
      });
}

namespace portable {

void threshold_band_sums(const Execution& execution, const ThresholdBand& of_step, const SparseActivations& listed,
                         const FeatureHits& of_window, Matrix<const float> thresholds, Array<float> activation_gradient,
                         Array<float> theta_gradient, Array<std::int64_t> active) {
  const ThresholdBand of = of_step;
  const FeatureHits hits = of_window;
  const std::int64_t n_features = listed.n_features;
  const float* const value = listed.value.data;
  float* const gradient = activation_gradient.data;
  for_teams(
      execution, "threshold_band_sums", active.size, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t key = team.league_rank(), begin = hits.offsets[key];
        const int count = static_cast<int>(hits.offsets[key + 1] - begin);
        const JumpRule rule = of.now();
        const float theta = thresholds(key / n_features, key % n_features);
        const double sum = sum_columns<double>(team, count, [&](int i) {
          const std::uint32_t at = hits.position[begin + i];
          return static_cast<double>(jump_factor(rule, value[at], theta)) * static_cast<double>(gradient[at]);
        });
        const std::int64_t n_active = sum_columns<std::int64_t>(team, count, [&](int i) {
          return jump_is_active(rule, value[hits.position[begin + i]], theta) ? std::int64_t{1} : std::int64_t{0};
        });
        for_columns(team, count, [&](int i) {
          const std::uint32_t at = hits.position[begin + i];
          if (!jump_is_active(rule, value[at], theta)) gradient[at] = 0.0f;
        });
        once(team, [&] {
          theta_gradient[key] = static_cast<float>(sum);
          active[key] = n_active;
        });
      });
}

}  // namespace portable

void threshold_band_backward(const Execution& execution, const ThresholdBand& of_step, const SparseActivations& listed,
                             const FeatureHits& hits, Matrix<const float> theta, Array<float> activation_gradient,
                             const ThresholdBandSums& sums) {
  const std::int64_t n_keys = listed.n_layers * listed.n_features;
  std::int64_t* const offsets = sums.active_offsets.data;
  for_all(
      execution, "threshold_band: first offset", 1, KOKKOS_LAMBDA(std::int64_t) { offsets[0] = 0; });
  threshold_band_sums(execution, of_step, listed, hits, theta, activation_gradient, {sums.theta.data, n_keys},
                      {offsets + 1, n_keys});
  offsets_from_counts(space_of(execution), offsets, n_keys);
}

}  // namespace weft::kernels

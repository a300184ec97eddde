// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/loss/penalty.hpp"

namespace weft::kernels {

namespace portable {

void sparsity_sums(const Execution& execution, const SparsityPenalty& of_loss, const SparseActivations& activations,
                   const FeatureHits& hits, Array<const float> norm, Array<float> norm_gradient, Array<double> value) {
  const SparsityPenalty penalty = of_loss;
  const std::int64_t* offsets = hits.offsets.data;
  const std::uint32_t* position = hits.position.data;
  const float* activation = activations.value.data;
  for_teams(
      execution, "sparsity_sums", norm.size, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t key = team.league_rank(), begin = offsets[key];
        const int count = static_cast<int>(offsets[key + 1] - begin);
        const float nu = norm[key];
        const double slopes = sum_columns<double>(team, count, [&](int i) {
          const float a = activation[position[begin + i]];
          return static_cast<double>(a * penalty.slope(a, nu));
        });
        const double values = sum_columns<double>(team, count, [&](int i) {
          return static_cast<double>(penalty.value(activation[position[begin + i]], nu));
        });
        once(team, [&] {
          const double coefficient = static_cast<double>(penalty.present());
          norm_gradient[key] = static_cast<float>(coefficient * slopes);
          value[key] = coefficient * values;
        });
      });
}

}  // namespace portable

void add_sparsity_gradient(const Execution& execution, const SparsityPenalty& of_loss,
                           const SparseActivations& activations, Array<const float> norm,
                           Array<float> activation_gradient) {
  const SparsityPenalty penalty = of_loss;
  const SparseActivations a = activations;
  for_all(
      execution, "add_sparsity_gradient", a.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i >= a.row_offsets[a.n_tokens]) return;
        const float nu = norm[a.key[i]];
        activation_gradient[i] += penalty.present() * nu * penalty.slope(a.value[i], nu);
      });
}

void decoder_row_factors(const Execution& execution, Array<float> first, Array<const float> second,
                         Array<const float> norm) {
  for_all(
      execution, "decoder_row_factors", first.size, KOKKOS_LAMBDA(std::int64_t i) {
        const float gradient = first[i] + (second.data != nullptr ? second[i] : 0.0f);
        first[i] = norm[i] > 0.0f ? gradient / norm[i] : 0.0f;
      });
}

}  // namespace weft::kernels

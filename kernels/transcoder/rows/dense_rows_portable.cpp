// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/rows/dense_rows.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"

namespace weft::kernels {

void add_to_rows(const Execution& execution, Array<const float> bias, Matrix<float> z) {
  for_teams(
      execution, "add_to_rows", z.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        float* row = z.row(team.league_rank());
        for_columns(team, static_cast<int>(z.columns), [&](int f) { row[f] += bias[f]; });
      });
}

void keep_largest(const Execution& execution, std::int64_t k, Matrix<float> z) {
  for_teams(
      execution, "keep_largest", z.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        float* row = z.row(team.league_rank());
        const int columns = static_cast<int>(z.columns);
        const auto reaching = [&](std::uint32_t key) {
          return sum_columns<std::int64_t>(team, columns,
                                           [&](int f) -> std::int64_t { return selection_key(row[f]) >= key ? 1 : 0; });
        };
        // Finds, bit by bit, the largest key that at least k values reach; 1 if fewer than k are positive.
        std::uint32_t kth = 0;
        for (int bit = 30; bit >= 0; --bit)
          if (const std::uint32_t tried = kth | 1u << bit; reaching(tried) >= k) kth = tried;
        if (kth == 0) kth = 1;
        const std::int64_t ties = k - reaching(kth + 1);  // values equal to the k-th key that are kept
        team.team_barrier();
        once(team, [&] {
          std::int64_t kept = 0;
          for (int f = 0; f < columns; ++f) {
            const std::uint32_t key = selection_key(row[f]);
            if (key < kth || (key == kth && kept++ >= ties)) row[f] = 0.0f;
          }
        });
      });
}

void keep_above(const Execution& execution, Matrix<const float> z, Array<const float> cut, Matrix<float> a) {
  for_teams(
      execution, "keep_above", z.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const float* from = z.row(team.league_rank());
        float* to = a.row(team.league_rank());
        for_columns(team, static_cast<int>(z.columns), [&](int f) {
          const float least = cut.data == nullptr ? 0.0f : cut[f];
          to[f] = from[f] > least ? from[f] : 0.0f;
        });
      });
}

void mask_inactive(const Execution& execution, Matrix<const float> activations, Matrix<float> gradient) {
  for_teams(
      execution, "mask_inactive", gradient.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const float* active = activations.row(team.league_rank());
        float* row = gradient.row(team.league_rank());
        for_columns(team, static_cast<int>(gradient.columns),
                    [&](int f) { row[f] = active[f] != 0.0f ? row[f] : 0.0f; });
      });
}

void jump_rows(const Execution& execution, const JumpRule& rule, Matrix<const float> z, Array<const float> theta,
               Matrix<float> alpha, Matrix<float> theta_gradient) {
  for_teams(
      execution, "jump_rows", z.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t n = team.league_rank();
        const float* value = z.row(n);
        float *const gradient = alpha.row(n), *const of_theta = theta_gradient.row(n);
        for_columns(team, static_cast<int>(z.columns), [&](int f) {
          of_theta[f] = jump_factor(rule, value[f], theta[f]) * gradient[f];
          gradient[f] = jump_passes_gradient(rule, value[f], theta[f]) ? gradient[f] : 0.0f;
        });
      });
}

}  // namespace weft::kernels

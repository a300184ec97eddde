// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/select/ranking.hpp"

namespace weft::kernels {
namespace {

struct RankScratch {
  float value[kChunkColumns];
};

struct StatisticsScratch {
  float weight[kChunkColumns];
};

constexpr float kSmallestSpread = 1e-6f;  // added to s

}  // namespace

namespace portable {

void rank_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> norm) {
  for_teams(
      execution, "rank_tile", product.rows, sizeof(RankScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        RankScratch& buffer = scratch<RankScratch>(team);
        for_chunks(product.columns, product.columns, [&](std::int64_t column, int count) {
          const float* p = row_chunk(team, product, row, column, count, buffer.value);
          store_chunk(team, product, row, column, count, [&](int c) {
            const float z = p[c] + bias[column + c];
            return z < 0.0f ? 0.0f : z * norm[column + c];
          });
        });
      });
}

void standardise_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> mean,
                      Array<const float> spread) {
  for_teams(
      execution, "standardise_tile", product.rows, sizeof(RankScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        RankScratch& buffer = scratch<RankScratch>(team);
        for_chunks(product.columns, product.columns, [&](std::int64_t column, int count) {
          const float* p = row_chunk(team, product, row, column, count, buffer.value);
          store_chunk(team, product, row, column, count, [&](int c) {
            const float z = p[c] + bias[column + c], above = z - mean[column + c];
            return z <= 0.0f || above <= 0.0f ? 0.0f : above / spread[column + c];
          });
        });
      });
}

}  // namespace portable

void centre_products(const Execution& execution, Array<const float> sums, std::int64_t n_tokens,
                     Matrix<float> products) {
  const std::int64_t d = products.columns;
  for_all(
      execution, "centre_products", d * d, KOKKOS_LAMBDA(std::int64_t i) {
        const double both = static_cast<double>(sums[i / d]) * static_cast<double>(sums[i % d]);
        float& value = products(i / d, i % d);
        value = static_cast<float>(static_cast<double>(value) - both / static_cast<double>(n_tokens));
      });
}

void feature_statistics(const Execution& execution, AnyMatrix weight, Array<const float> bias,
                        Matrix<const float> product, Array<const float> sums, std::int64_t n_tokens, Array<float> mean,
                        Array<float> spread) {
  for_teams(
      execution, "feature_statistics", weight.rows, sizeof(StatisticsScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        StatisticsScratch& buffer = scratch<StatisticsScratch>(team);
        double sum = 0.0, square = 0.0;
        for_chunks(weight.columns, weight.columns, [&](std::int64_t column, int count) {
          const float* w = row_chunk(team, weight, row, column, count, buffer.weight);
          const float* p = product.row(row) + column;
          const float* s = sums.data + column;
          sum += sum_columns<double>(team, count, [&](int c) { return static_cast<double>(w[c]) * s[c]; });
          square += sum_columns<double>(team, count, [&](int c) { return static_cast<double>(w[c]) * p[c]; });
        });
        const double tokens = static_cast<double>(n_tokens), variance = square / (tokens > 1 ? tokens - 1 : 1);
        once(team, [&] {
          mean[row] = static_cast<float>(sum / tokens + static_cast<double>(bias[row]));
          spread[row] = static_cast<float>(sqrt(variance > 0 ? variance : 0)) + kSmallestSpread;
        });
      });
}

void unstandardise(const Execution& execution, const SparseActivations& activations, Array<const float> mean,
                   Array<const float> spread) {
  const SparseActivations a = activations;
  for_all(
      execution, "unstandardise", a.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i >= a.row_offsets[a.n_tokens]) return;
        const float z = a.value[i] * spread[a.key[i]] + mean[a.key[i]];
        a.value[i] = z < 0.0f ? 0.0f : z;
      });
}

void unrank(const Execution& execution, const SparseActivations& activations, Array<const float> norm) {
  const SparseActivations a = activations;
  for_all(
      execution, "unrank", a.key.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (i < a.row_offsets[a.n_tokens]) a.value[i] /= norm[a.key[i]];
      });
}

}  // namespace weft::kernels

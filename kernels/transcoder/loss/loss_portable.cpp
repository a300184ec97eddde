// SPDX-License-Identifier: Apache-2.0
#include "base/contract.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/loss/loss.hpp"

namespace weft::kernels::portable {
namespace {

struct LossScratch {
  float residual[kChunkColumns];
  float part[kChunkColumns];
  float target[kChunkColumns];
};

// Columns that one team of column_sums owns, and tokens it sums before it adds to the total.
constexpr int kOwnColumns = 64;
constexpr int kTokensPerBlock = 128;

struct ColumnScratch {
  float total[kOwnColumns];
  float block[kOwnColumns];
  float row[kOwnColumns];
};

}  // namespace

void residual_and_loss(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                       Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                       std::int64_t n_layers, float gradient_factor, AnyMatrix gradient_rows, LossSums sums,
                       Array<std::byte> workspace) {
  const std::int64_t n_tokens = target.rows;
  const std::int64_t d_model = target.columns / n_layers;
  const std::int64_t n_blocks = loss_blocks(n_tokens);
  double* block_sums = reinterpret_cast<double*>(workspace.data);  // [n_blocks, n_layers, kLossSums]
  WEFT_ASSERT(workspace.size >= loss_workspace(n_tokens, n_layers));

  for_teams(
      execution, "residual_and_loss", n_blocks * n_layers, sizeof(LossScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t block = team.league_rank() / n_layers;
        const std::int64_t layer = team.league_rank() % n_layers;
        LossScratch& buffer = scratch<LossScratch>(team);
        double error = 0.0, standardised_error = 0.0, standardised_target = 0.0;
        const std::int64_t token_end = smaller((block + 1) * kTokensPerLossSum, n_tokens);
        for (std::int64_t token = block * kTokensPerLossSum; token < token_end; ++token)
          for_chunks(d_model, d_model, [&](std::int64_t chunk, int count) {
            const std::int64_t column = layer * d_model + chunk;
            const float* b = bias.data + column;
            const float* c0 = centre.data + column;
            const float* scale = standardise.data + column;
            float* residual = buffer.residual;
            for (std::int64_t part = 0; part < n_parts; ++part) {
              const float* p = row_chunk(team, partial, part * n_tokens + token, column, count, buffer.part);
              if (part == 0)
                for_columns(team, count, [&](int c) { residual[c] = p[c]; });
              else
                for_columns(team, count, [&](int c) { residual[c] += p[c]; });
            }
            const float* y = row_chunk(team, target, token, column, count, buffer.target);
            for_columns(team, count, [&](int c) { residual[c] = (residual[c] + b[c]) - y[c]; });
            store_chunk(team, gradient_rows, token, column, count,
                        [&](int c) { return gradient_factor * residual[c]; });
            error += sum_columns<double>(team, count, [&](int c) {
              const double e = residual[c];
              return e * e;
            });
            standardised_error += sum_columns<double>(team, count, [&](int c) {
              const double e = residual[c] * scale[c];
              return e * e;
            });
            standardised_target += sum_columns<double>(team, count, [&](int c) {
              const double t = (y[c] - c0[c]) * scale[c];
              return t * t;
            });
          });
        once(team, [&] {
          double* to = block_sums + team.league_rank() * kLossSums;
          to[0] = error;
          to[1] = standardised_error;
          to[2] = standardised_target;
        });
      });

  for_all(
      execution, "loss_sums", n_layers * kLossSums, KOKKOS_LAMBDA(std::int64_t i) {
        double sum = 0.0;
        for (std::int64_t block = 0; block < n_blocks; ++block) sum += block_sums[block * n_layers * kLossSums + i];
        const std::int64_t layer = i / kLossSums;
        if (i % kLossSums == 0)
          sums.squared_error[layer] = sum;
        else if (i % kLossSums == 1)
          sums.standardised_squared_error[layer] = sum;
        else
          sums.standardised_squared_target[layer] = sum;
      });
}

void column_sums(const Execution& execution, AnyMatrix matrix, Array<float> out) {
  const std::int64_t n_teams = (matrix.columns + kOwnColumns - 1) / kOwnColumns;
  for_teams(
      execution, "column_sums", n_teams, sizeof(ColumnScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t column = team.league_rank() * std::int64_t{kOwnColumns};
        const int count = smaller(kOwnColumns, matrix.columns - column);
        ColumnScratch& buffer = scratch<ColumnScratch>(team);
        for_columns(team, count, [&](int c) { buffer.total[c] = 0.0f; });
        for (std::int64_t begin = 0; begin < matrix.rows; begin += kTokensPerBlock) {
          const std::int64_t end = begin + smaller(kTokensPerBlock, matrix.rows - begin);
          for_columns(team, count, [&](int c) { buffer.block[c] = 0.0f; });
          for (std::int64_t row = begin; row < end; ++row) {
            const float* value = row_chunk(team, matrix, row, column, count, buffer.row);
            for_columns(team, count, [&](int c) { buffer.block[c] += value[c]; });
          }
          for_columns(team, count, [&](int c) { buffer.total[c] += buffer.block[c]; });
        }
        for_columns(team, count, [&](int c) { out[column + c] = buffer.total[c]; });
      });
}

}  // namespace weft::kernels::portable

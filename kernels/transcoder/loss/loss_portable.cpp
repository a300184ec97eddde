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

// Columns that one team of column_sums owns, and tokens that it sums before it adds to the total.
constexpr int kOwnColumns = 64;
constexpr int kTokensPerBlock = 128;

struct LossColumnScratch {
  float total[kOwnColumns];
  float block[kOwnColumns];
  float row[kOwnColumns];
};

template <bool kWeighted>
void form_residual_and_loss(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                            Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                            Array<const float> weight, std::int64_t n_layers, float gradient_factor,
                            AnyMatrix gradient_rows, LossSums sums, Array<std::byte> workspace) {
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
            const float* w = kWeighted ? weight.data + column : nullptr;
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
            store_chunk(team, gradient_rows, token, column, count, [&](int c) {
              return kWeighted ? gradient_factor * (w[c] * residual[c]) : gradient_factor * residual[c];
            });
            error += sum_columns<double>(team, count, [&](int c) {
              const double e = residual[c];
              return kWeighted ? static_cast<double>(w[c]) * e * e : e * e;
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

}  // namespace

void residual_and_loss(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                       Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                       std::int64_t n_layers, float gradient_factor, AnyMatrix gradient_rows, LossSums sums,
                       Array<std::byte> workspace) {
  form_residual_and_loss<false>(execution, partial, n_parts, target, bias, centre, standardise, {}, n_layers,
                                gradient_factor, gradient_rows, sums, workspace);
}

void column_sums(const Execution& execution, AnyMatrix matrix, Array<float> out) {
  const std::int64_t n_teams = (matrix.columns + kOwnColumns - 1) / kOwnColumns;
  for_teams(
      execution, "column_sums", n_teams, sizeof(LossColumnScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t column = team.league_rank() * std::int64_t{kOwnColumns};
        const int count = smaller(kOwnColumns, matrix.columns - column);
        LossColumnScratch& buffer = scratch<LossColumnScratch>(team);
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

namespace weft::kernels {

void weighted_residual_and_loss(const Execution& execution, AnyMatrix partial, std::int64_t n_parts, AnyMatrix target,
                                Array<const float> bias, Array<const float> centre, Array<const float> standardise,
                                Array<const float> weight, std::int64_t n_layers, float gradient_factor,
                                AnyMatrix gradient_rows, LossSums sums, Array<std::byte> workspace) {
  portable::form_residual_and_loss<true>(execution, partial, n_parts, target, bias, centre, standardise, weight,
                                         n_layers, gradient_factor, gradient_rows, sums, workspace);
}

void square(const Execution& execution, Array<const float> spread, Array<float> weight) {
  for_all(
      execution, "square", weight.size, KOKKOS_LAMBDA(std::int64_t i) { weight[i] = spread[i] * spread[i]; });
}

void target_moments(const Execution& execution, AnyMatrix target, Array<const float> centre, Array<double> out) {
  const std::int64_t width = target.columns;
  for_all(
      execution, "target_moments", width, KOKKOS_LAMBDA(std::int64_t j) {
        double sum = 0.0, squares = 0.0;
        for (std::int64_t i = 0; i < target.rows; ++i) {
          const double v = static_cast<double>(static_cast<const float*>(target.data)[i * target.stride + j]) -
                           static_cast<double>(centre[j]);
          sum += v;
          squares += v * v;
        }
        out[j] = sum;
        out[width + j] = squares;
      });
}

namespace {
/// Smallest variance that is distinguished from 0, relative to the sum of squares from which it is formed: a smaller
/// one is within the rounding error.
constexpr double kNoVariance = 1e-12;
}  // namespace

void unexplained_weights(const Execution& execution, Array<const double> moments, std::int64_t n_parts,
                         std::int64_t n_tokens, std::int64_t d_model, Array<float> weight) {
  const std::int64_t width = weight.size;
  for_all(
      execution, "unexplained_weights", width / d_model, KOKKOS_LAMBDA(std::int64_t layer) {
        double variance = 0.0, largest = 0.0;
        for (std::int64_t j = layer * d_model; j < (layer + 1) * d_model; ++j) {
          double sum = 0.0, squares = 0.0;
          for (std::int64_t part = 0; part < n_parts; ++part) {
            sum += moments[part * 2 * width + j];
            squares += moments[part * 2 * width + width + j];
          }
          largest += squares;
          variance += squares - sum * sum / static_cast<double>(n_tokens);
        }
        const double w = variance > kNoVariance * largest
                             ? static_cast<double>(n_tokens) * static_cast<double>(d_model) / variance
                             : 0.0;
        for (std::int64_t j = layer * d_model; j < (layer + 1) * d_model; ++j) weight[j] = static_cast<float>(w);
      });
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
#include "kernels/gradient/gradient.hpp"
#include "kernels/optimize/adam_rule.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {
namespace {

constexpr int kSums = 4;  // sums in JumpSums, in its order

struct BlockSums {
  Matrix<float> of[kSums];  // [blocks of tokens, features]

  BlockSums(std::int64_t n_tokens, std::int64_t n_features, Workspace& workspace) {
    const std::int64_t blocks = row_sums(n_tokens);
    for (Matrix<float>& sum : of)
      sum = {workspace.take<float>(blocks * n_features).data, blocks, n_features, n_features};
  }
};

struct SumScratch {
  float theta[kChunkColumns];
  float bias[kChunkColumns];
  float norm[kChunkColumns];
  float value[kChunkColumns];
  float product[kChunkColumns];
};

// One team per block of tokens and chunk of features.
void sum_blocks(const Execution& execution, const JumpRule of_form, const JumpTile tile, const BlockSums out) {
  const std::int64_t n_chunks = (tile.product.columns + kChunkColumns - 1) / kChunkColumns;
  const bool sparsity = tile.sparsity.active(), preactivation = tile.preactivation.active();
  const bool negative = tile.preactivation.form == PreactivationForm::negative;
  for_teams(
      execution, "jump_backward", out.of[0].rows * n_chunks, sizeof(SumScratch), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t block = team.league_rank() / n_chunks;
        const std::int64_t column = team.league_rank() % n_chunks * kChunkColumns;
        const int count = smaller(kChunkColumns, tile.product.columns - column);
        const std::int64_t end = smaller((block + 1) * kRowsPerSum, tile.product.rows);
        SumScratch& sum = scratch<SumScratch>(team);
        JumpRule rule = of_form;
        if (tile.step != nullptr) rule.bandwidth = tile.bandwidth.at(tile.step->step);
        const float *const bias = tile.bias.data + column, *const theta = tile.theta.data + column;
        const float* const norm = tile.norm.data == nullptr ? nullptr : tile.norm.data + column;
        const float of_sparsity = sparsity ? tile.sparsity.present() : 0.0f;
        const float of_preactivation = tile.preactivation.coefficient;
        for_columns(team, count, [&](int c) { sum.theta[c] = sum.bias[c] = sum.norm[c] = sum.value[c] = 0.0f; });
        for (std::int64_t row = block * kRowsPerSum; row < end; ++row) {
          const float* product = row_chunk(team, tile.product, row, column, count, sum.product);
          float* const alpha = tile.alpha.row(row) + column;
          for_columns(team, count, [&](int c) {
            const float z = product[c] + bias[c];
            float da = alpha[c];
            if (sparsity) {
              const float a = jump_is_active(rule, z, theta[c]) ? z : 0.0f;
              da += of_sparsity * norm[c] * tile.sparsity.slope(a, norm[c]);
            }
            sum.theta[c] += jump_factor(rule, z, theta[c]) * da;
            float dz = jump_passes_gradient(rule, z, theta[c]) ? da : 0.0f;
            if (preactivation && negative && z < 0.0f) {
              dz -= of_preactivation;
              sum.value[c] -= of_preactivation * z;
            }
            if (preactivation && !negative && z < theta[c]) {
              const float below = of_preactivation * (theta[c] - z);
              dz -= of_preactivation * norm[c];
              sum.theta[c] += of_preactivation * norm[c] * (rule.logarithmic ? theta[c] : 1.0f);
              sum.norm[c] += below;
              sum.value[c] += below * norm[c];
            }
            if (!tile.replace_alpha) return;
            sum.bias[c] += dz;
            alpha[c] = dz;
          });
        }
        for_columns(team, count, [&](int c) {
          out.of[0](block, column + c) = sum.theta[c];
          out.of[1](block, column + c) = sum.bias[c];
          out.of[2](block, column + c) = sum.norm[c];
          out.of[3](block, column + c) = sum.value[c];
        });
      });
}

void sum_over_blocks(const Execution& execution, const Matrix<float> blocks, bool add, const Array<float> out) {
  if (out.data == nullptr) return;
  for_all(
      execution, "jump_backward: blocks", out.size, KOKKOS_LAMBDA(std::int64_t i) {
        float sum = add ? out[i] : 0.0f;
        for (std::int64_t block = 0; block < blocks.rows; ++block) sum += blocks(block, i);
        out[i] = sum;
      });
}

}  // namespace

void jump_bounds(const Execution& execution, const JumpRule& of_form, Array<const float> theta, Array<float> bounds) {
  const JumpRule rule = of_form;
  for_all(
      execution, "jump_bounds", theta.size, KOKKOS_LAMBDA(std::int64_t i) { bounds[i] = jump_bound(rule, theta[i]); });
}

std::int64_t jump_backward_workspace(std::int64_t n_tokens, std::int64_t n_features) {
  Workspace workspace(nullptr);
  const BlockSums sums(n_tokens, n_features, workspace);
  return workspace.bytes();
}

void jump_backward(const Execution& execution, const JumpRule& rule, const JumpTile& tile, bool add,
                   const JumpSums& sums, Array<std::byte> workspace) {
  if (tile.product.rows == 0 || tile.product.columns == 0) return;
  Workspace placed(workspace.data);
  const BlockSums blocks(tile.product.rows, tile.product.columns, placed);
  sum_blocks(execution, rule, tile, blocks);
  const Array<float> out[kSums] = {sums.theta, sums.bias, sums.norm, sums.value};
  for (int i = 0; i < kSums; ++i) sum_over_blocks(execution, blocks.of[i], add, out[i]);
}

void update_thresholds(const Execution& execution, const JumpRule& rule, const ParameterVector& theta,
                       Array<const float> gradient, const AdamStep* step) {
  const bool logarithmic = rule.logarithmic;
  const ParameterVector parameters = theta;
  for_all(
      execution, "update_thresholds", gradient.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (step->withheld != 0) return;
        const AdamStep adam = *step;
        float m = parameters.first_moment[i], v = parameters.second_moment[i];
        // Only the change of the logarithm is applied: a threshold without gradient keeps its bits.
        float w = logarithmic ? 0.0f : parameters.weight[i];
        adam_rule(adam, 0.0f, gradient[i], w, m, v);
        parameters.weight[i] = logarithmic ? parameters.weight[i] * expf(w) : w;
        parameters.first_moment[i] = m;
        parameters.second_moment[i] = v;
      });
}

void add_row_squares(const Execution& execution, Matrix<const float> gradient, const AdamStep* step,
                     Array<double> out) {
  for_teams(
      execution, "add_squares", gradient.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        if (step != nullptr && step->withheld != 0) return;
        const std::int64_t row = team.league_rank();
        const double scale = static_cast<double>(step != nullptr ? step->gradient_scale : 1.0f);
        const double sum = sum_columns<double>(team, static_cast<int>(gradient.columns), [&](int c) {
          const double g = scale * static_cast<double>(gradient(row, c));
          return g * g;
        });
        once(team, [&] { out[row] += sum; });
      });
}

}  // namespace weft::kernels

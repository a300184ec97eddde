// SPDX-License-Identifier: Apache-2.0
//
// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019) over the columns of each row, fused with the residual
// sum before them:
//
//   h = x + addend         r = 1 / sqrt(mean((h - mu)^2) + epsilon)      (RMSNorm: mu = 0)
//   y = weight * (h - mu) * r + bias
//
// Backward, with a = weight * dy and xhat = (h - mu) * r:
//
//   dh += r * (a - mean(a) - xhat * mean(a * xhat))                       (RMSNorm: without mean(a))
//
// dh already holds the gradient that reaches h past the norm (the residual stream). The gradients of weight and bias,
//
//   dweight_j = sum over n of dy[n, j] xhat[n, j]          dbias_j = sum over n of dy[n, j]
//
// are formed by a GradientSink (training/gradient_sink.hpp): from h, dy, mu and r, or, without reading these again,
// from the partial sums over blocks of rows that the backward pass leaves.
//
// Rows are fp32, bf16 or fp16, arithmetic and statistics are fp32. Sums over a row have a fixed order.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

enum class Norm : int { layer, rms };

struct NormWeights {
  Norm kind = Norm::layer;
  Array<const float> weight;  ///< [columns]
  Array<const float> bias;    ///< [columns], or empty
  float epsilon = 1e-5f;
};

/// Statistics of the rows, kept for the backward pass.
struct NormStatistics {
  Array<float> mean;     ///< [rows]; empty for Norm::rms
  Array<float> inverse;  ///< [rows]: r
};

/// y from x, and the sum h. addend: [rows, columns], or without data (h = x; `sum` is then not written). `sum` may be
/// x or addend. y may have another type than x.
void norm_forward(const Execution&, const NormWeights&, AnyMatrix x, AnyMatrix addend, AnyMatrix sum, AnyMatrix y,
                  const NormStatistics&);

/// Most blocks of rows whose sums norm_backward forms (NormSums): all run at once on a GPU of 132 multiprocessors, and
/// their sums are a small part of the traffic.
constexpr std::int64_t most_norm_blocks(std::int64_t rows) {
  constexpr std::int64_t kFewestRows = 8, kMostBlocks = 640;
  const std::int64_t blocks = (rows + kFewestRows - 1) / kFewestRows;
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}
/// Rows of a block, and the blocks.
constexpr std::int64_t norm_block_rows(std::int64_t rows) {
  const std::int64_t blocks = most_norm_blocks(rows);
  return blocks == 0 ? 1 : (rows + blocks - 1) / blocks;
}
constexpr std::int64_t norm_blocks(std::int64_t rows) {
  return (rows + norm_block_rows(rows) - 1) / norm_block_rows(rows);
}

/// Sums over the rows of each block, [norm_blocks(rows), columns], or without data: not wanted. Their column sums are
/// gradients: of the norm's weight and bias, and of a bias that was added to h.
struct NormSums {
  Matrix<float> weight;  ///< of dy * xhat
  Matrix<float> bias;    ///< of dy
  Matrix<float> input;   ///< of dh as stored
};

/// dh += … as above; h, dy, dh [rows, columns]; dh may be dy. `overwrite`: dh is not read. Overwrites `sums`.
void norm_backward(const Execution&, const NormWeights&, AnyMatrix h, const NormStatistics&, AnyMatrix dy, AnyMatrix dh,
                   bool overwrite, const NormSums& sums);

}  // namespace weft::kernels

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
//   dh = addend + r * (a - mean(a) - xhat * mean(a * xhat))               (RMSNorm: without mean(a))
//
// addend is the gradient that reaches h past the norm (the residual stream). The gradients of weight and bias,
//
//   dweight_j = sum over n of dy[n, j] xhat[n, j]          dbias_j = sum over n of dy[n, j]
//
// are formed by a GradientSink (model/gradient_sink.hpp): from h, dy, mu and r, or, without reading these again,
// from the partial sums over blocks of rows that the backward pass leaves.
//
// Rows are fp32, bf16 or fp16, arithmetic and statistics are fp32. Sums over a row have a fixed order.
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

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
WEFT_KERNEL(norm_forward, void(const Execution&, const NormWeights&, AnyMatrix x, AnyMatrix addend, AnyMatrix sum,
                               AnyMatrix y, const NormStatistics&));

/// Division of the rows into the blocks whose sums norm_backward forms (NormSums): `block` rows each, from every
/// multiple of `length` on, where a shorter block ends.
struct NormBlocks {
  std::int64_t length = 0, block = 1;

  /// Blocks for at most `rows` rows: all run at once on a GPU of 132 multiprocessors unless there are more lengths, and
  /// their sums are a small part of the traffic. length: 0 for that of all rows.
  static constexpr NormBlocks of(std::int64_t rows, std::int64_t length = 0) {
    if (length == 0) length = rows;
    if (length == 0) return {};
    const std::int64_t lengths = above(rows, length), most = above(length, kFewestRows),
                       fitting = lengths < kBlocks ? kBlocks / lengths : 1;
    return {length, above(length, fitting < most ? fitting : most)};
  }
  /// Largest number of blocks that any of(n), n <= rows, has.
  static constexpr std::int64_t most(std::int64_t rows) {
    const std::int64_t blocks = above(rows, kFewestRows);
    return blocks < kBlocks ? blocks : kBlocks;
  }
  constexpr std::int64_t of_length() const { return above(length, block); }
  constexpr std::int64_t count(std::int64_t rows) const {
    return length == 0 ? 0 : rows / length * of_length() + above(rows % length, block);
  }
  constexpr std::int64_t begin(std::int64_t b) const { return b / of_length() * length + b % of_length() * block; }
  constexpr std::int64_t end(std::int64_t b, std::int64_t rows) const {
    const std::int64_t of_this = (b / of_length() + 1) * length, next = begin(b) + block;
    const std::int64_t last = of_this < next ? of_this : next;
    return last < rows ? last : rows;
  }

 private:
  static constexpr std::int64_t kFewestRows = 8, kBlocks = 640;
  static constexpr std::int64_t above(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
};

/// Sums over the rows of each block, [blocks.count(rows), columns], or without data: not formed. Their column sums are
/// gradients: of the norm's weight and bias, and of a bias that was added to h.
struct NormSums {
  Matrix<float> weight;    ///< of dy * xhat
  Matrix<float> bias;      ///< of dy
  Matrix<float> input;     ///< of dh as stored
  NormBlocks blocks = {};  ///< without length: NormBlocks::of(rows)
};

/// dh = … as above; h, dy, dh [rows, columns]; dh may be dy. addend: as dh, which it may be, or without data: nothing
/// is added. Overwrites `sums`.
WEFT_KERNEL(norm_backward, void(const Execution&, const NormWeights&, AnyMatrix h, const NormStatistics&, AnyMatrix dy,
                                AnyMatrix addend, AnyMatrix dh, const NormSums& sums));

}  // namespace weft::kernels

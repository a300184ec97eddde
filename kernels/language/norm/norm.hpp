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
// dh already holds the gradient that reaches h past the norm (the residual stream). The gradients of weight and bias
// are formed by a GradientSink from h, dy, mu and r (kernels/gradient/gradient.hpp).
//
// Rows are fp32 or bf16, arithmetic and statistics are fp32. Sums over a row have a fixed order.
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

/// dh += … as above; h, dy, dh [rows, columns]. `overwrite`: dh is not read.
void norm_backward(const Execution&, const NormWeights&, AnyMatrix h, const NormStatistics&, AnyMatrix dy, AnyMatrix dh,
                   bool overwrite);

}  // namespace weft::kernels

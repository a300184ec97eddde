// SPDX-License-Identifier: Apache-2.0
//
// A norm (norm.hpp) whose denominators r stay as they are: but for the bias a linear map of each row. With a = weight *
// dy:
//
//   y  = weight * r * (h - mean(h)) + bias
//   dh = addend + r * (a - mean(a))               (RMSNorm: without the means)
//
// Rows of several gradients of one text: those of position t are t * group .. (t + 1) * group - 1.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/norm/norm.hpp"

namespace weft::kernels {

/// y from h, which have the shape [rows, columns]; y may have another type than h. inverse: r, [rows].
void frozen_norm_forward(const Execution&, const NormWeights&, Array<const float> inverse, AnyMatrix h, AnyMatrix y);

/// dy, dh [positions * group, columns], addend like dh or without data: nothing is added. dh may be dy or addend.
/// inverse: r, [positions].
void frozen_norm_backward(const Execution&, const NormWeights&, Array<const float> inverse, std::int64_t group,
                          Matrix<const float> dy, Matrix<const float> addend, Matrix<float> dh);

}  // namespace weft::kernels

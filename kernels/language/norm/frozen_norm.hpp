// SPDX-License-Identifier: Apache-2.0
//
// Backward pass of a norm (norm.hpp) whose denominators r stay as they are: a linear map of each row. With
// a = weight * dy:
//
//   dh = addend + r * (a - mean(a))               (RMSNorm: without mean(a))
//
// Rows of several gradients of one text: those of position t are t * group .. (t + 1) * group - 1.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/language/norm/norm.hpp"

namespace weft::kernels {

/// dy, dh [positions * group, columns], addend like dh or without data: nothing is added. dh may be dy or addend.
/// inverse: r, [positions].
void frozen_norm_backward(const Execution&, const NormWeights&, Array<const float> inverse, std::int64_t group,
                          Matrix<const float> dy, Matrix<const float> addend, Matrix<float> dh);

}  // namespace weft::kernels

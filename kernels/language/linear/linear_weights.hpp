// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"

namespace weft::kernels {

/// Weights and bias of a product (linear.hpp).
struct LinearWeights {
  AnyMatrix matrix;                     ///< W [outputs, inputs], or its transpose
  bool transposed = false;              ///< stored as [inputs, outputs]
  Array<const float> bias = {};         ///< [outputs], or empty
  Array<const bf16> rounded_bias = {};  ///< the same rounded to nearest, for an epilogue; or empty
};

}  // namespace weft::kernels

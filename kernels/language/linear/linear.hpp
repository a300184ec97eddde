// SPDX-License-Identifier: Apache-2.0
//
// Products of a language model with an element-wise step beside them:
//
//   linear                  y = x Wᵀ + b
//   linear_backward         dx = dy W
//   linear_gelu_backward    dhidden = (dy W) ∘ gelu'(hidden)     for y = gelu(hidden) Wᵀ
//
// On the CUDA backend the dense library adds the bias and multiplies by the slope before it stores the sums (Epilogue,
// gemm/gemm.hpp), where it takes the types and strides: bias and slope are then not applied to rounded sums. The GELU
// itself is not fused: from `hidden` as stored it has the same bits when it is computed again.
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/gemm/fp8.hpp"

namespace weft::kernels {

struct LinearWeights {
  AnyMatrix matrix;                     ///< W [outputs, inputs], or its transpose
  bool transposed = false;              ///< stored as [inputs, outputs]
  Array<const float> bias = {};         ///< [outputs], or empty
  Array<const bf16> rounded_bias = {};  ///< the same rounded to nearest, for an epilogue; or empty
};

/// x [n, inputs], y [n, outputs]. Workspace: that of gemm.
void linear(const Execution&, const LinearWeights&, AnyMatrix x, AnyMatrix y, Array<std::byte> workspace);

/// The same of operands in 8 bits (gemm/fp8.hpp): x [n, inputs], weight [outputs, inputs], y in bf16. The bias is that
/// of `weights`. Workspace: that of gemm_coded.
void linear_coded(const Execution&, const LinearWeights& weights, const CodedRows& weight, const CodedRows& x,
                  AnyMatrix y, Array<std::byte> workspace);

/// dy [n, outputs], dx [n, inputs].
void linear_backward(const Execution&, const LinearWeights&, AnyMatrix dy, AnyMatrix dx, Array<std::byte> workspace);

/// dy [n, outputs], hidden and dhidden [n, inputs], different memory. False where no product takes the slope: nothing
/// is enqueued then, and linear_backward with mlp_activation_backward gives the same within rounding.
bool linear_gelu_backward(const Execution&, const LinearWeights&, AnyMatrix dy, AnyMatrix hidden, AnyMatrix dhidden,
                          Array<std::byte> workspace);

/// `size` numbers rounded to nearest.
struct RoundedCopy {
  const float* from = nullptr;
  bf16* to = nullptr;
  std::int64_t size = 0;
};
/// Forms several copies. `copies` is memory of the kernels; largest: the largest size.
void round_copies(const Execution&, Array<const RoundedCopy> copies, std::int64_t largest);

}  // namespace weft::kernels

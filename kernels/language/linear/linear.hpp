// SPDX-License-Identifier: Apache-2.0
// Products of a language model with a step before or after them:
//
//   linear                  y = x Wᵀ + b                          or residual + x Wᵀ + b
//   linear_activated        activated = activation(x Wᵀ + b)      x: rows, or norm(h)
//   linear_backward         dx = dy W
//   linear_gelu_backward    dhidden = (dy W) ∘ gelu'(hidden)     for y = gelu(hidden) Wᵀ
//
// On the CUDA backend the dense library adds the bias, applies a GELU and multiplies by its slope before it stores the
// sums (Epilogue, gemm/gemm.hpp), where it takes the types and strides: they are then not applied to rounded sums.
// Elsewhere the functions form the product and the step by separate kernels.
//
// Products of at most 64 rows of bf16, such as those of a step of generation, have a kernel of their own on GPUs from
// compute capability 9.0 on (few_rows_cuda.hpp). There a row of y does not depend on the number of rows, and a product
// applies the activation to y as it would be stored. The same kernel applies a norm to the rows that it reads and adds
// the residual stream to those that it writes (linear_operands.hpp). Elsewhere norm and sum have kernels of their own.
//
// Packed weights (LinearWeights::packed) are unpacked before the product, but for products of so few rows on such GPUs:
// these read the codes (packed_rows_cuda.hpp).
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/gemm/fp8.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/linear/linear_operands.hpp"

namespace weft::kernels {

/// Computes y = x Wᵀ + b: x [n, inputs], y [n, outputs]; with a residual also the sum and its moments. Workspace: that
/// of gemm.
void linear(const Execution&, const LinearWeights&, const LinearInput& x, const LinearOutput& y,
            Array<std::byte> workspace);

/// True if products of so few rows of this type and width have kernels that apply norms and form sums with the residual
/// stream. If not, linear and norm_forward with separate operands are faster than joined ones.
bool joins_norms(const Execution&, Scalar type, std::int64_t rows, std::int64_t width);

/// Forms the terms of norm(h) Wᵀ + b (linear_operands.hpp), which follow from the parameters alone: sums, bias
/// [outputs]. W is not transposed and not packed.
void form_norm_terms(const Execution&, const LinearWeights& weights, const NormWeights&, Array<float> sums,
                     Array<float> bias);
/// Forms the moments and the scaled rows that a product leaves of `rows`, where none has left them.
void form_moments(const Execution&, AnyMatrix rows, Array<Moments> moments, const ScaledRows& scaled);

/// Product with operands in 8 bits (gemm/fp8.hpp): x [n, inputs], weight [outputs, inputs], y in bf16. The bias is that
/// of `weights`. Workspace: that of gemm_coded.
void linear_coded(const Execution&, const LinearWeights& weights, const CodedMatrix& weight, const CodedMatrix& x,
                  AnyMatrix y, Array<std::byte> workspace);

/// Product and activation, for passes that no backward pass follows. hidden [n, outputs]: memory for x Wᵀ + b, which
/// may be formed or not. activated [n, outputs], or half as many of gated activations.
void linear_activated(const Execution&, const LinearWeights& weights, const LinearInput& x, AnyMatrix hidden,
                      MlpActivation, AnyMatrix activated, Array<std::byte> workspace);

/// Computes dx = dy W: dy [n, outputs], dx [n, inputs].
void linear_backward(const Execution&, const LinearWeights&, AnyMatrix dy, AnyMatrix dx, Array<std::byte> workspace);

/// Gradient through the product and the tanh form of the GELU. dy [n, outputs], hidden and dhidden [n, inputs],
/// different memory.
void linear_gelu_backward(const Execution&, const LinearWeights&, AnyMatrix dy, AnyMatrix hidden, AnyMatrix dhidden,
                          Array<std::byte> workspace);

/// Copy of `size` numbers, rounded to nearest.
struct RoundedCopy {
  const float* from = nullptr;
  bf16* to = nullptr;
  std::int64_t size = 0;
};
/// Forms several copies. `copies` is memory of the kernels; largest: the largest size.
void round_copies(const Execution&, Array<const RoundedCopy> copies, std::int64_t largest);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Products of a language model with an element-wise step beside them:
//
//   linear                  y = x Wᵀ + b
//   linear_activated        the same, and activated = activation(y)
//   linear_gelu             activated = gelu(x Wᵀ + b)
//   linear_of_norm          y = activation(norm(x) Wᵀ + b), after join_norm
//   linear_added            sum = residual + x Wᵀ + b
//   linear_backward         dx = dy W
//   linear_gelu_backward    dhidden = (dy W) ∘ gelu'(hidden)     for y = gelu(hidden) Wᵀ
//
// On the CUDA backend the dense library adds the bias and multiplies by the slope before it stores the sums (Epilogue,
// gemm/gemm.hpp), where it takes the types and strides: bias and slope are then not applied to rounded sums. The
// activation is formed from y as stored: it has the same bits when it is computed again. Where there is no backward
// pass it is formed from the sums too.
//
// Products of at most 64 rows of bf16, such as those of a step of generation, have a kernel of their own on GPUs from
// compute capability 9.0 on (few_rows_cuda.hpp). There a row of y does not depend on the number of rows, and products
// apply the norm of the rows that they read and add the residual stream: a step has no kernels of its own for norms.
#pragma once

#include <cstddef>
#include <optional>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/gemm/fp8.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/decode/cached_ahead.hpp"
#include "kernels/language/linear/moments.hpp"
#include "kernels/language/norm/norm.hpp"

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

/// linear and mlp_activation in one kernel, with the same bits. y, activated [n, outputs]. False where there is none:
/// of gated activations, and where `linear` has no kernel of its own. Nothing is enqueued then.
bool linear_activated(const Execution&, const LinearWeights& weights, AnyMatrix x, AnyMatrix y, MlpActivation,
                      AnyMatrix activated);

/// activated = gelu(x Wᵀ + b), the tanh form, of sums that are not rounded before. False where no product takes the
/// activation: nothing is enqueued then, and `linear` with mlp_activation gives the same within rounding.
bool linear_gelu(const Execution&, const LinearWeights&, AnyMatrix x, AnyMatrix activated, Array<std::byte> workspace);

/// Most rows of a product that has a kernel for few rows.
constexpr std::int64_t kMostFewRows = 64;

/// A product of normalised rows in which the weights of the norm are those of the product: with its statistics mean and
/// r (norm/norm.hpp), norm(x) Wᵀ + b = r (x W'ᵀ - mean s) + b'.
struct JoinedNorm {
  LinearWeights weights;    ///< W'_oi = W_oi weight_i rounded to bf16 [outputs, inputs], b'_o = b_o + sum W_oi bias_i
  Array<const float> sums;  ///< s_o = sum of W'_oi over i [outputs]
  Norm kind = Norm::layer;
  float epsilon = 1e-5f;
};

/// Forms W', b' and s. weights: in bf16 or fp32, W as it is or transposed; sums are fp32. All kernels.
JoinedNorm join_norm(const Execution&, const LinearWeights& weights, const NormWeights& norm, Matrix<bf16> joined,
                     Array<float> bias, Array<float> sums);

/// True if linear_of_norm and linear_added take a product of this size: few rows of `type`, on a GPU with a kernel for
/// them.
bool joins_norms(const Execution&, const LinearWeights& weights, std::int64_t rows, Scalar type);

/// y = activation(norm(x) Wᵀ + b), or without activation if there is none, from the moments [n, moment_groups(inputs)]
/// of x that a product before has left. Instead of norm(x), W' is rounded; the product is rounded as `linear` and
/// mlp_activation round it. x [n, inputs], y [n, outputs]. ahead: requested meanwhile.
void linear_of_norm(const Execution&, const JoinedNorm&, Array<const Moments> moments, AnyMatrix x, AnyMatrix y,
                    std::optional<MlpActivation> activation, const CachedAhead& ahead = {});

/// sum = residual + (x Wᵀ + b), with the bits of `linear` and a norm's sum, and its moments. x [n, inputs]; residual,
/// sum [n, outputs]; moments [n, moment_groups(outputs)].
void linear_added(const Execution&, const LinearWeights& weights, AnyMatrix x, AnyMatrix residual, AnyMatrix sum,
                  Array<Moments> moments, const CachedAhead& ahead = {});

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

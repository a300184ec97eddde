// SPDX-License-Identifier: Apache-2.0
//
// Backward pass of the activation function, on the sparse lists:
//
//   a = f(z)      dz[i] = da[i] * f'(z[i])      i: position in SparseActivations
//
// relu, topk, batch_topk and jumprelu have f' = 1 on every stored entry: dz = da. For these a training step calls no
// kernel and uses da as dz (activation_passes_gradient). Gradients outside the lists (thresholds of jumprelu) are in
// jump_relu.hpp.
//
// To add an activation: an enumerator, its parameters in ActivationFunction, its case in preactivation_gradient, which
// the portable and the CUDA kernel share.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

enum class Activation { batch_topk, topk, relu, jumprelu };

/// True if a number of features is kept (k); false if every feature above a bound is, however many.
constexpr bool activation_keeps_k(Activation kind) {
  return kind == Activation::batch_topk || kind == Activation::topk;
}

/// True if dz = da on every stored entry, so that the caller can use da as dz.
constexpr bool activation_passes_gradient(Activation kind) {
  switch (kind) {
    case Activation::batch_topk:
    case Activation::topk:
    case Activation::relu:
    case Activation::jumprelu:
      return true;
  }
  return false;
}

/// An activation function with its parameters; addresses are readable by kernels.
struct ActivationFunction {
  Activation kind = Activation::batch_topk;
};

/// What activation_backward writes.
struct ActivationGradients {
  Array<float> preactivation;  ///< dz [capacity] by CSR position; may be the array that holds da
};

/// dz of one entry. key = layer * n_features + feature; value: the activation a.
WEFT_HOST_DEVICE inline float preactivation_gradient(const ActivationFunction& function, std::uint32_t /*key*/,
                                                     float /*value*/, float activation_gradient) {
  switch (function.kind) {
    case Activation::batch_topk:
    case Activation::topk:
    case Activation::relu:
    case Activation::jumprelu:
      break;
  }
  return activation_gradient;
}

/// Overwrites dz of the entries in use (row_offsets[n_tokens]) from da (`activation_gradient`, [capacity], fp32, by CSR
/// position). Enqueues nothing if dz = da and both are one array.
void activation_backward(const Execution&, const ActivationFunction&, const SparseActivations&,
                         Array<const float> activation_gradient, const ActivationGradients&);

}  // namespace weft::kernels

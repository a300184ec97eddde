// SPDX-License-Identifier: Apache-2.0
//
// Products of a training step with dense matrices, one per source layer: the baseline of the sparse kernels. Host only,
// fp32; not part of a CUDA build. A_s, Z_s are the activations and pre-activations [N, F] of source layer s, G the
// gradient rows [N, L * d], W_s a decoder [F, (L - s) * d].
//
//   decode    y[:, s*d:] += A_s W_s         (over all s)         decoder gradient      dW_s = A_s^T G[:, s*d:]
//   encoder gradient  dW_enc_s = dZ_s^T X_s                      activation gradient   dA_s = G[:, s*d:] W_s^T
//
// The encoder's forward product is encode_tile over all features, the update adam_rows.
#pragma once

#include <span>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Overwrites `dense` [N, F] with the entries of one layer of a CSR; `value` (by CSR position) gives the numbers:
/// activations, or their gradients.
void scatter_activations(const Execution&, const SparseActivations&, Array<const float> value, std::int64_t layer,
                         Matrix<float> dense);

/// gradient = 0 wherever the activation is 0: dA_s -> dZ_s, both [N, F].
void mask_gradient(const Execution&, Matrix<const float> activations, Matrix<float> gradient);

/// Overwrites y [N, L * d]: one product per source layer.
void dense_decode(const Execution&, std::span<const Matrix<const float>> activations,
                  std::span<const Matrix<const float>> decoder, Matrix<float> y);

/// Overwrites out [F, (L - s) * d] of source layer s = L - out.columns / d.
void dense_decoder_gradient(const Execution&, Matrix<const float> activations, Matrix<const float> gradient_rows,
                            Matrix<float> out);

/// Overwrites out [N, F].
void dense_activation_gradient(const Execution&, Matrix<const float> decoder, Matrix<const float> gradient_rows,
                               Matrix<float> out);

/// Overwrites out [F, d] from dZ_s [N, F] and the inputs x [N, d] of the layer.
void dense_encoder_gradient(const Execution&, Matrix<const float> preactivation_gradient, Matrix<const float> x,
                            Matrix<float> out);

}  // namespace weft::kernels

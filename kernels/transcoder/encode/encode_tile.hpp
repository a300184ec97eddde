// SPDX-License-Identifier: Apache-2.0
//
// The encoder: the only dense product of a step, and its sparse backward pass.
//
//   product[n, f] = < x[n], W_enc[f] >                      the bias is added by the consumer of the product (select/)
//   dW_enc[f]     = sum over tokens with f active: dz[n,f] * x[n]          db[f] = sum of dz[n,f]
//
// Invariant: the product is stored in the type of `product` (device.precision) before the bias is added in fp32, so
// selection sees the same key on every path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/privacy/row_noise.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Bytes of workspace of encode_tile for tiles of at most n_tokens x n_features (gemm_workspace: operands that the
/// dense library does not take are widened there).
std::int64_t encode_workspace(Backend, std::int64_t n_tokens, std::int64_t n_features, std::int64_t d_model,
                              Scalar input, StorageType storage, Scalar product);

/// Overwrites product [n_tokens, n] (fp32 or bf16) with x [n_tokens, d] (fp32 or bf16) times rows [row_begin, row_begin
/// + n) of the encoder; fp32 sums. The same shapes give the same bits. Throws Error(internal) when the dense library
/// fails.
/// If fp32 weights are stored as two 16-bit planes (weight_rest), only the bf16 plane is used; x must then be bf16.
void encode_tile(const Execution&, AnyMatrix x, const ParameterRows& encoder, std::int64_t row_begin, AnyMatrix product,
                 Array<std::byte> workspace);

/// One rectangle of products, in this rank's indices.
struct TileRange {
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int64_t feature_begin = 0;
  std::int64_t feature_count = 0;
};

/// Operands of the products of a batch, for a selection that forms the products itself (select/).
struct EncoderOperands {
  AnyMatrix x;                        ///< [n_tokens, layers * d]
  std::span<const AnyMatrix> weight;  ///< layers x [n_features, d]
  /// A range of tokens of a range of layers.
  struct Part {
    std::int64_t layer_begin = 0, layer_end = 0;
    std::int64_t token_begin = 0, token_count = 0;
  };
  /// Called for part 0, 1, ... before its products are enqueued: makes the execution wait until its inputs have
  /// arrived. The parts are in the order in which inputs arrive; together they are all tokens of all layers, each once.
  /// After the last one it is called once more and returns a part without layers.
  std::function<Part(const Execution&, std::size_t i)> arrive;
  /// Replaces `arrive` where products are formed in the order of the tiles: called before those of a tile of `layer`,
  /// makes the execution wait until the layer's inputs have arrived. Called with the number of layers when no products
  /// follow.
  std::function<void(const Execution&, std::int64_t layer)> arrive_layer;
};

/// Bytes of workspace of the two backward passes; capacity as SparseActivations::key.size.
WEFT_KERNEL(encode_backward_workspace, std::int64_t(Backend, std::int64_t n_layers, std::int64_t n_features,
                                                    std::int64_t d_model, std::int64_t capacity));

/// Applies Adam to every encoder row and bias of every layer, from dz (`preactivation_gradient`, by CSR position) and
/// the inputs x [N, L * d]. encoder[s] is [F, d], bias[s] is [F]. squared_norm as in decode_backward_update: one double
/// per row, bias included.
WEFT_KERNEL(encode_backward_update, void(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix x,
                                         Array<const float> preactivation_gradient,
                                         std::span<const ParameterRows> encoder, std::span<const ParameterVector> bias,
                                         const AdamStep* step, Array<double> squared_norm, Array<std::byte> workspace));

/// Forms squared_norm only (without gradient_scale); does not change parameters.
WEFT_KERNEL(encode_backward_norm,
            void(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix x,
                 Array<const float> preactivation_gradient, Array<double> squared_norm, Array<std::byte> workspace));

/// encode_backward_update or, without a step, encode_backward_norm of gradients with noise.
WEFT_KERNEL(encode_backward_noisy,
            void(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix x,
                 Array<const float> preactivation_gradient, std::span<const ParameterRows> encoder,
                 std::span<const ParameterVector> bias, const AdamStep* step, Array<double> squared_norm,
                 Array<std::byte> workspace, const RowNoise& noise, const RowNoise& bias_noise));

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// The cross-layer decoder over sparse activations.
//
//   forward    y[n, t]   = sum over s <= t, active (s, f) of token n:  a[n,s,f] * W[s][f, t-s]           (token-major)
//   backward   da[n,s,f] = sum over t >= s of < W[s][f, t-s], g[n, t] > (feature-major)
//              dW[s][f]  = sum over tokens n with (s, f) active:       a[n,s,f] * g[n, s..L-1]
//
// Invariants. W[s] is [n_features, (n_layers - s) * d_model]: one feature's strip (all its targets) is contiguous, and
// so are the columns s*d .. L*d of a row of y and g that it touches. If W[s] is [n_features, d_model], a feature writes
// to t = s alone. Sums run in the order of the sparse lists, in fp32. The backward pass reads W and g once, for da
// (with the weights before the update) and dW together; dW lives in registers or cache and the optimizer is applied in
// place: it is never stored.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/privacy/row_noise.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// True if a decoder row has a segment for each layer from its own on, false if it has one for its own layer alone.
inline bool is_cross_layer(std::span<const ParameterRows> decoder) {
  return decoder[0].columns == static_cast<std::int64_t>(decoder.size()) * decoder[0].segment;
}

/// Overwrites y [token_count, n * d] (fp32 or bf16) with the contribution of this rank's features to the target layers
/// [target_begin, target_begin + n) of the tokens [token_begin, token_begin + token_count). No bias. decoder[s] for
/// every layer s.
WEFT_KERNEL(decode_forward,
            void(const Execution&, const SparseActivations&, std::int64_t token_begin, std::int64_t token_count,
                 std::span<const ParameterRows> decoder, std::int64_t target_begin, AnyMatrix y));

/// Overwrites norm[key] (key = layer * F + row, [L * F]) with the Euclidean norm of the decoder row over all its
/// targets.
WEFT_KERNEL(decoder_norms, void(const Execution&, std::span<const ParameterRows> decoder, Array<float> norm));

/// Bytes of workspace of the two backward passes; capacity as SparseActivations::key.size. `norms`: true if
/// new_norms is formed.
WEFT_KERNEL(decode_backward_workspace, std::int64_t(Backend, std::int64_t n_layers, std::int64_t n_features,
                                                    std::int64_t d_model, std::int64_t capacity, bool norms));

/// Gradient rows that are still being exchanged when the backward pass begins. Those of targets >= `first` are
/// complete; all are complete for work enqueued after `wait()`, which enqueues and does not block. Empty `wait`: all
/// are complete.
struct LateRows {
  std::int64_t first = 0;
  std::function<void()> wait;
};

/// Factors by which W is added to dW before clipping: the gradient of a penalty on the norms of decoder rows
/// (loss/penalty.hpp).
struct RowFactors {
  static constexpr bool kPresent = true;
  const float* factor = nullptr;  ///< by key, [L * F]
  WEFT_HOST_DEVICE float row(std::int64_t key) const { return factor[key]; }
  WEFT_HOST_DEVICE float operator()(float of_row, float weight) const { return of_row * weight; }
};

/// Forms da (`activation_gradient`, [capacity], by CSR position) from gradient rows g [N, L * d], then applies Adam to
/// every row of every decoder, also on rows without a hit (their moments decay). `squared_norm` (one double per row of
/// all layers, in key order) receives |gradient_scale * dW|^2 when its data is not null. `factors`: RowFactors; without
/// data: none. `new_norms`, only with factors, receives the result that decoder_norms would give afterwards, bit for
/// bit; the CUDA kernels form it from the weights in registers. A withheld step leaves new_norms as they are or writes
/// the same values.
WEFT_KERNEL(decode_backward_update,
            void(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix gradient_rows,
                 std::span<const ParameterRows> decoder, const AdamStep* step, Array<float> activation_gradient,
                 Array<double> squared_norm, Array<std::byte> workspace, const LateRows& late,
                 Array<const float> factors, Array<float> new_norms));

/// Forms da and squared_norm as decode_backward_update does (without gradient_scale); does not change parameters.
WEFT_KERNEL(decode_backward_norm,
            void(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix gradient_rows,
                 std::span<const ParameterRows> decoder, Array<float> activation_gradient, Array<double> squared_norm,
                 Array<std::byte> workspace, const LateRows& late, Array<const float> factors));

/// decode_backward_update or, without a step, decode_backward_norm of gradients with noise; no factors.
WEFT_KERNEL(decode_backward_noisy,
            void(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix gradient_rows,
                 std::span<const ParameterRows> decoder, const AdamStep* step, Array<float> activation_gradient,
                 Array<double> squared_norm, Array<std::byte> workspace, const LateRows& late, const RowNoise& noise));

}  // namespace weft::kernels

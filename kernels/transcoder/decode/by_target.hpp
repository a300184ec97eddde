// SPDX-License-Identifier: Apache-2.0
//
// Lists for a decoder tied per target: feature f of every layer writes the same row of W_t to layer t.
//
//   y^[t] = sum over s <= t, active (s, f):  a'[s, t, f] W_t[f]        a' = (a + o[s,t,f]) gamma[s,t,f], or a' = a
//   d loss / d a[s, f] = sum over t >= s of gamma[s,t,f] delta[s,t,f]  delta[s,t,f] = < g[t], W_t[f] >
//
// So the products are those of a decoder per layer over longer lists: the list of target t has one entry for every
// entry of a source s <= t, with the key t * F + f and the value a'. Entries ascend by layer, so the sources of a
// target are the first entries of a token, and the list of a token is that of target 0, then of target 1, ...: no sort
// is needed. Formulas: EleutherAI/clt-training (post_enc, post_enc_scale), curt-tigges/crosslayer-coding (per_target).
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Offsets o and scales gamma by pair of layers, [L (L + 1) / 2, F] fp32: pairs (0, 0), (0, 1), ..., (1, 1), ...
/// An array without data stands for o = 0 or gamma = 1.
struct PairAffine {
  Matrix<float> offset, scale;
};
/// Number of the pair of source s and target t in that order.
WEFT_HOST_DEVICE constexpr std::int64_t pair_of(std::int64_t source, std::int64_t target, std::int64_t n_layers) {
  return source * n_layers - source * (source - 1) / 2 + target - source;
}

/// Writes the lists by target of the entries `of` into `out` (n_tokens, n_layers, n_features as in `of`; room for
/// n_layers times the entries). begin [n_tokens * n_layers + 1] receives the start of the list of each token and
/// target.
void lists_by_target(const Execution&, const SparseActivations& of, const PairAffine&, SparseActivations out,
                     Array<std::int64_t> begin);

/// Forms the hits of the lists by target from the hits of `of`, ordered by source, then by token.
void hits_by_target(const Execution&, const SparseActivations& of, const FeatureHits&, Array<const std::int64_t> begin,
                    FeatureHits out);

/// Forms activation_gradient (by position in `of`) from delta (by position in the lists by target).
void gradient_by_source(const Execution&, const SparseActivations& of, const PairAffine&,
                        Array<const std::int64_t> begin, Array<const float> delta, Array<float> activation_gradient);

/// Forms the gradients of o and gamma by pair, [pairs, F]: sums over the hits of a feature of gamma delta and
/// (a + o) delta, in fp64, rounded once.
void affine_gradient(const Execution&, const SparseActivations& of, const FeatureHits&, const PairAffine&,
                     Array<const std::int64_t> begin, Array<const float> delta, const PairAffine& gradient);

/// Scales rows in place: rows[i, j] *= scale[i].
void scale_each_row(const Execution&, Array<const float> scale, Matrix<float> rows);

/// Turns norms of rows into norms of features, by key [L * F], in place: norm[s, f]^2 = sum over t >= s of
/// norm[t, f]^2. Scales are ignored (as in crosslayer-coding).
void norms_of_features(const Execution&, std::int64_t n_layers, Array<float> norm);

/// Turns factors of features into factors of rows (RowFactors), in place: factor[t, f] = sum over s <= t of
/// factor[s, f].
void factors_of_rows(const Execution&, std::int64_t n_layers, Array<float> factor);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Selection by another quantity than the pre-activation: r = relu(z) nu, with nu[f] the norm of the feature's decoder
// row, all its targets (Llamascopium). The selection works on r in place of the product, without bias; afterwards the
// values are activations again, a = r / nu.
//
// r is stored in the type of the product, so a is z up to one more rounding of that type.
//
// The second quantity is r = (z - m[f]) / (s[f] + 1e-6) where z and r are positive, with m and s the mean and the
// standard deviation (over n - 1) of z over the N tokens of a batch (crosslayer-coding). m and s follow from the mean
// and covariance of the inputs, without z:
//
//   m = w . S/N + b      s^2 = w C w^T / (N - 1)      S = sum of x~      C = sum of x~^T x~ - S^T S / N
#pragma once

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Ranks a tile in place: product[n, f] = max(product[n, f] + bias[f], 0) * norm[f], rounded to the type of the
/// product. NaN stays NaN.
WEFT_KERNEL(rank_tile, void(const Execution&, AnyMatrix product, Array<const float> bias, Array<const float> norm));

/// Forms C from the sum of x~^T x~ in place: products[i, j] -= sums[i] sums[j] / n_tokens; [d, d].
void centre_products(const Execution&, Array<const float> sums, std::int64_t n_tokens, Matrix<float> products);

/// mean[f] = m and spread[f] = s + 1e-6 of the features of a tile. weight [features, d]: w; product [features, d]: w C.
void feature_statistics(const Execution&, AnyMatrix weight, Array<const float> bias, Matrix<const float> product,
                        Array<const float> sums, std::int64_t n_tokens, Array<float> mean, Array<float> spread);

/// product[n, f] = r of z = product[n, f] + bias[f], or 0, rounded to the type of the product. NaN stays NaN.
WEFT_KERNEL(standardise_tile, void(const Execution&, AnyMatrix product, Array<const float> bias,
                                   Array<const float> mean, Array<const float> spread));

/// Restores value[i] = z, at least 0, for the entries in use. mean, spread [L * F].
void unstandardise(const Execution&, const SparseActivations&, Array<const float> mean, Array<const float> spread);

/// Restores activations: value[i] /= norm[key[i]] for the entries in use. norm [L * F]; the norm of a selected feature
/// is not 0.
void unrank(const Execution&, const SparseActivations&, Array<const float> norm);

}  // namespace weft::kernels

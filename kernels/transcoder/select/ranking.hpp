// SPDX-License-Identifier: Apache-2.0
//
// Selection by another quantity than the pre-activation: r = relu(z) nu, with nu[f] the norm of the feature's decoder
// row, all its targets (Llamascopium). The selection works on r in place of the product, without bias; afterwards the
// values are activations again, a = r / nu.
//
// r is stored in the type of the product, so a is z up to one more rounding of that type.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// product[n, f] = max(product[n, f] + bias[f], 0) * norm[f], rounded to the type of the product. NaN stays NaN.
void rank_tile(const Execution&, AnyMatrix product, Array<const float> bias, Array<const float> norm);

/// value[i] /= norm[key[i]] for the entries in use. norm [L * F]; that of a selected feature is not 0.
void unrank(const Execution&, const SparseActivations&, Array<const float> norm);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Joins the sparse lists of several groups of tokens and keeps a range of features: a rank of the data axis updates a
// slice of the features over the tokens of all groups. Can also drop entries that do not exceed a bound.
#pragma once

#include <span>

#include "kernels/dispatch.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Joins the lists of `groups`, whose tokens follow one another, and keeps the entries of the features [first_feature,
/// first_feature + out.n_features) of every layer, numbered from 0. The order within a token is kept, so the result
/// equals that of one list over all tokens. `groups` agree in n_layers and n_features; out.n_tokens is the sum of
/// theirs, and out.key and out.value must hold every entry that is kept. Overwrites `out`. With `bounds` [n_layers *
/// n_features of the groups] only entries whose value is above the bound of their key are kept.
WEFT_KERNEL(restrict_features, void(const Execution&, std::span<const SparseActivations> groups,
                                    std::int64_t first_feature, SparseActivations out, Array<const float> bounds));

}  // namespace weft::kernels

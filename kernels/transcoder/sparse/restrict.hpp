// SPDX-License-Identifier: Apache-2.0
//
// Sparse lists of several groups of tokens, cut down to some of the features: what a rank of the data axis updates is a
// slice of the features over the tokens of all groups.
#pragma once

#include <span>

#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Joins the lists of `groups`, whose tokens follow one another, and keeps the entries of the features [first_feature,
/// first_feature + out.n_features) of every layer, numbered from 0. Order within a token stays, so that the result is
/// what one list over all tokens would give. `groups` agree in n_layers and n_features; out.n_tokens is the sum of
/// theirs, and out.key and out.value must have room for every entry kept. Overwrites `out`.
void restrict_features(const Execution&, std::span<const SparseActivations> groups, std::int64_t first_feature,
                       SparseActivations out);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Baseline (benchmark.attention = "matrix"): attention that forms the matrix of scores [length, length] of every head
// in memory, with a product of the dense library for each head and a softmax in between. The matrices of one layer
// exist at a time: the backward pass forms them again. A trainer that keeps those of all layers needs `layers` times as
// much.
#pragma once

#include "language_model/settings/configuration.hpp"

namespace weft::bench {

language_model::AttentionKernels matrix_attention();

}  // namespace weft::bench

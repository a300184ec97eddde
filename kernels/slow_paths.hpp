// SPDX-License-Identifier: Apache-2.0
//
// Sizes that the hand-written CUDA kernels do not take: these run through Kokkos or element by element, far slower.
// Each function returns the reason, or "" for sizes that are taken. Kernels select by them and the plan of a run names
// them.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/array.hpp"

namespace weft::kernels {

/// Columns that a lane of the vectorised kernels has at once: rows are a multiple of them.
constexpr std::int64_t kVectorColumns = 8;
/// A norm holds a row in registers.
constexpr std::int64_t kMostNormColumns = 8192;

/// Tensor cores, for own kernels; cuDNN takes other sizes. dropout: of the probabilities.
std::string slow_attention(std::int64_t head_size, Scalar type, bool dropout);

/// Rotary positions and norms of queries and keys. rotated: columns of a head; 0: none.
std::string slow_query_key(std::int64_t head_size, std::int64_t rotated);

std::string slow_norm(std::int64_t columns);

/// Sums of a transcoder's decoder and the backward passes with their updates, by feature. width: d_model. rows: the
/// type of gradient rows and inputs.
std::string slow_feature_rows(std::int64_t width, Scalar rows);

}  // namespace weft::kernels

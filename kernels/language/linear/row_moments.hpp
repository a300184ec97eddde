// SPDX-License-Identifier: Apache-2.0
//
// Moments of the rows of a matrix over groups of 32 columns, the last of which may have fewer: what a product leaves of
// the rows that it forms, for a norm of them in the next product (linear.hpp).
#pragma once

#include "kernels/array.hpp"

namespace weft::kernels {

struct alignas(8) Moments {
  float mean = 0;
  float squares = 0;  ///< sum of (x - mean)^2
};

constexpr int kMomentColumns = 32;

/// Groups of a row: of a matrix [n, columns] the moments are [n, moment_groups(columns)].
constexpr std::int64_t moment_groups(std::int64_t columns) { return (columns + kMomentColumns - 1) / kMomentColumns; }

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace weft::kernels {

/// Rows that are summed before their sum is added to others.
constexpr std::int64_t kRowsPerSum = 128;

constexpr std::int64_t row_sums(std::int64_t rows) { return (rows + kRowsPerSum - 1) / kRowsPerSum; }

}  // namespace weft::kernels

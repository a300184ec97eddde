// SPDX-License-Identifier: Apache-2.0
//
// A product of several blocks of rows has columns that belong to one block each: this kernel takes from each column the
// rows of its own block.
#pragma once

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

/// out[i, j] = in[(block[j] - first) * out.rows + i, j]. block: [columns] of each column, at least `first`.
void own_rows(const Execution&, Matrix<const float> in, Array<const std::int32_t> block, std::int32_t first,
              Matrix<float> out);

}  // namespace weft::kernels

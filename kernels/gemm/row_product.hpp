// SPDX-License-Identifier: Apache-2.0
//
// The product of gemm_by_row (gemm.hpp), as the dense library has that of gemm.
#pragma once

#include "kernels/gemm/dense_library.hpp"

namespace weft::kernels {

/// All matrices are fp32, A is plain, sizes are above 0. No workspace is used.
decltype(dense_library::multiply) multiply_by_row;

}  // namespace weft::kernels

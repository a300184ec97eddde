// SPDX-License-Identifier: Apache-2.0
//
// The encoder's product of encode.hpp through cuBLASLt, for bf16 inputs and bf16 weights (of fp32 weights the bf16
// plane).
#pragma once

#include <vector>

#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/transcoder/encode/encode.hpp"

namespace weft::kernels::cuda {

/// The algorithms to take where a record fits shape, GPU and library; before the first product of a shape.
void use_gemm_records(std::vector<GemmRecord>);
/// Those taken so far in this process, one a shape.
std::vector<GemmRecord> gemm_records_in_use();

}  // namespace weft::kernels::cuda

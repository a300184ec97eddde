// SPDX-License-Identifier: Apache-2.0
//
// CSR -> CSC of sparse.hpp on NVIDIA GPUs.
#pragma once

#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels::cuda {

/// capacity as SparseActivations::key.size.
std::int64_t transpose_workspace(std::int64_t n_keys, std::int64_t capacity);

void transpose(const Execution&, const SparseActivations&, FeatureHits hits, Array<std::byte> workspace);

}  // namespace weft::kernels::cuda

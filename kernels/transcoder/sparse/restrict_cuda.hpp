// SPDX-License-Identifier: Apache-2.0
//
// restrict.hpp on NVIDIA GPUs.
#pragma once

#include "kernels/transcoder/sparse/restrict.hpp"

namespace weft::kernels::cuda {

void restrict_features(const Execution&, std::span<const SparseActivations> groups, std::int64_t first_feature,
                       SparseActivations out);

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
//
// What this machine can do at best, measured: the limits that `weft benchmark` and --profile compare with.
#pragma once

#include <cstdint>

#include "kernels/execution.hpp"
#include "parallel/communicator.hpp"

namespace weft::run {

struct MachineLimits {
  double copy_gb_per_second = 0;  ///< bytes read and written, on memory much larger than the caches
  double gemm_gflops = 0;         ///< a dense product of the sizes of the model
};

/// GB/s of a memory copy, reads and writes counted. Allocates 512 MiB where the kernels run. Collective: all ranks
/// measure at the same time, as in a step; returns the mean over ranks.
double measure_copy(const kernels::Execution&, const parallel::Communicator& world);

/// GFLOP/s of the dense product of [n_tokens, d_model] with [n_features, d_model], in bf16 on a GPU, else in fp32.
/// Collective, mean over ranks.
double measure_product(const kernels::Execution&, std::int64_t n_tokens, std::int64_t n_features, std::int64_t d_model,
                       const parallel::Communicator& world);

}  // namespace weft::run

// SPDX-License-Identifier: Apache-2.0
//
// Language models for weft benchmark, with batches in memory: the step of weft lm train.
#pragma once

#include <memory>

#include "bench/benchmark.hpp"
#include "language_model/blocks/architecture.hpp"

namespace weft::bench {

/// A model with the default values of its keys.
std::unique_ptr<BenchmarkModel> language_benchmark();

/// Operations per token of forward and backward pass, without recomputation.
ModelFlops model_flops(const language_model::Architecture&, std::int64_t length);

}  // namespace weft::bench

// SPDX-License-Identifier: Apache-2.0
//
// A transcoder with resident batches, for weft benchmark: the sparse step of weft train, or the dense formulation that
// it is compared with.
#pragma once

#include <memory>
#include <string>

#include "parallel/grid.hpp"
#include "training/benchmark.hpp"
#include "transcoder/benchmark/settings.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

/// Why this formulation cannot run here; "" if it can.
std::string obstacle(const Configuration&, const BenchmarkSettings&, const parallel::World&);

/// Makes the batches. `execution`: that of the runtime; the backend is the one of the configuration. The configuration
/// and the grid must outlive the subject. Collective.
std::unique_ptr<training::BenchmarkSubject> benchmark_subject(const Configuration&, const BenchmarkSettings&,
                                                              const parallel::Grid&, const kernels::Execution&,
                                                              int n_threads);

}  // namespace weft::transcoder

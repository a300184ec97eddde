// SPDX-License-Identifier: Apache-2.0
//
// Initialises Kokkos, the dense library and, in a CUDA build, the GPU of this process. Commands that only read headers
// do not need it: a CUDA build can do a dry run on a machine without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "device/settings.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// One object per process, alive while kernels are used.
class Runtime {
 public:
  /// Selects the GPU by node_rank, the number of this process among the node_size processes of the node. Throws
  /// Error(usage), known to all ranks, if the requested backend is not available.
  Runtime(const Settings&, int node_rank, int node_size);
  Runtime(const Runtime&) = delete;
  ~Runtime();

  const kernels::Execution& execution() const { return execution_; }
  int threads() const { return threads_; }
  /// Selected backend and reason, one line for the log: "portable (Kokkos OpenMP, 2 threads): built without CUDA". A
  /// GPU is given with its bus id.
  const std::string& description() const { return description_; }

 private:
  kernels::Execution execution_;
  int threads_ = 1;
  std::string description_;
};

}  // namespace weft::device

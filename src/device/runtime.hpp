// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of one process: Kokkos, the dense library and, in a CUDA build, its GPU. Started by the commands that
// compute, never by those that only read headers: a CUDA build dry-runs on a machine without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "device/settings.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// Lives once in a process, from the first arithmetic to the end of the command.
class Runtime {
 public:
  /// node_rank of node_size processes share this node: the GPU is chosen by node_rank. Throws Error(usage) when the
  /// backend asked for is not there.
  Runtime(const Settings&, int node_rank, int node_size);
  Runtime(const Runtime&) = delete;
  ~Runtime();

  const kernels::Execution& execution() const { return execution_; }
  int threads() const { return threads_; }
  /// What was taken and why, one line for the log: "portable (Kokkos OpenMP, 2 threads): built without CUDA"; of a GPU
  /// with its bus id, which tells it from all others of its host.
  const std::string& description() const { return description_; }

 private:
  kernels::Execution execution_;
  int threads_ = 1;
  std::string description_;
};

}  // namespace weft::device

// SPDX-License-Identifier: Apache-2.0
//
// Initialises Kokkos, the dense library and, in a CUDA build, the GPU of this process. Commands that only read headers
// do not need it: a CUDA build can do a dry run on a machine without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "device/device_settings.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// device.threads, or, if that is 0, OMP_NUM_THREADS, at most the CPUs that this process may use; 0 if neither is
/// given.
int requested_threads(const Settings&);

/// Host threads of each of `sharing` processes with the same CPUs: those requested, or, if none are, its share of the
/// hardware threads that this process may use. Throws Error(usage) if there are fewer of these, or if a library cannot
/// start as many.
int host_threads(const Settings&, int sharing);

/// PCI bus id of the GPU that a Runtime with this node_rank selects, as in /sys/bus/pci/devices; "" without a GPU.
std::string gpu_bus_id(int node_rank);
/// Type of that GPU, as the driver names it: "NVIDIA H200"; "" without a GPU.
std::string gpu_name(int node_rank);

/// One object per process. It must exist while kernels are used.
class Runtime {
 public:
  /// Selects the GPU by node_rank, the number of this process among those of the node. sharing: as of `host_threads`.
  /// Throws Error(usage), known to all ranks, if the requested backend is not available; as `host_threads`.
  Runtime(const Settings&, int node_rank, int sharing);
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

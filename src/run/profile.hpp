// SPDX-License-Identifier: Apache-2.0
//
// --profile: records a few steps of a command (base/trace.hpp), writes them as DIRECTORY/profile.json for Perfetto or
// chrome://tracing, and sums them up in five figures. Works for every model: a command only states how many bytes the
// phases of its step must move.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/ranges.hpp"
#include "device/runtime.hpp"
#include "parallel/world.hpp"
#include "storage/json_file.hpp"

namespace weft::run {

/// The work of a phase on one rank.
struct Work {
  double bytes = 0;  ///< bytes that must be moved
  double flops = 0;  ///< operations of dense products
};

/// Phase -> bytes that one rank must move in it per step, at least: each datum once per phase, whatever a kernel reads
/// again.
using PhaseBytes = std::vector<std::pair<std::string, double>>;

class Profile {
 public:
  /// Inactive unless `wanted`. Measures the limit of memory copies and resets the peak of device memory, so it comes
  /// before the state is allocated. Collective.
  Profile(bool wanted, const parallel::World&, const device::Runtime&);
  Profile(const Profile&) = delete;
  ~Profile();

  bool active() const { return active_; }

  /// Writes profile.json, prints the figures and returns them for run.json (`profile`):
  ///   steps                       recorded steps
  ///   ms_per_step                 of the slowest rank
  ///   device_peak_bytes           where the kernels run, of the largest rank
  ///   utilisation_percent         part of the time in which the GPU was busy; on the host, CPU time (busy waiting
  ///                               included) over the time of all threads of the rank
  ///   kernel_ms_per_step          in phases that compute: device time on a GPU, else host time
  ///   bandwidth_percent_of_limit  bytes of the phases over kernel time, over the rate of a memory copy
  ///   copy_gb_per_second, bytes_per_step
  /// The last five are means over ranks; without phases with bytes, bandwidth_percent_of_limit and bytes_per_step are
  /// null. Null when inactive. Collective; throws Error(io).
  Json conclude(const std::filesystem::path& directory, const PhaseBytes&);

 private:
  const parallel::World& world_;
  const device::Runtime& runtime_;
  bool active_;
  std::optional<device::DeviceTrace> device_;
  double copy_gb_per_second_ = 0;
};

}  // namespace weft::run

// SPDX-License-Identifier: Apache-2.0
//
// Memory that every rank may use for a run, known before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "device/device_settings.hpp"
#include "parallel/world.hpp"

namespace weft::run {

struct HostShare {
  std::int64_t bytes = 0;  ///< per rank; 0: not known
  std::string limit;       ///< what limits it, for messages: "MemAvailable of node03 / 4 ranks"
};

/// Host memory: the available memory of a node divided by the ranks there, of the node with the least. Collective.
HostShare usable_host_memory(const parallel::World&);

/// Device memory of the rank with the least, in bytes, at most device.memory; 0 without a GPU. `context_bytes`: taken
/// by the CUDA context of a process, which a plan counts. Collective.
std::int64_t usable_device_bytes(const device::Settings&, std::int64_t context_bytes, const parallel::World&);

}  // namespace weft::run

// SPDX-License-Identifier: Apache-2.0
#include "run/usable_memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "device/host_memory.hpp"
#include "device/memory.hpp"
#include "device/runtime.hpp"

namespace weft::run {

HostShare usable_host_memory(const parallel::World& world) {
  const device::HostMemory memory = device::available_host_memory();
  const std::int64_t known = memory.bytes > 0 ? memory.bytes / world.node_size() : INT64_MAX;
  std::int64_t least = -known;
  world.all().maximum({&least, 1});
  // The lowest rank with the least memory names its node.
  std::int64_t from = known == -least ? -world.rank() : -world.size();
  world.all().maximum({&from, 1});
  const std::string limit = world.all().broadcast(fmt::format("{} of {} / {} rank{}", memory.limit, world.host(),
                                                              world.node_size(), world.node_size() == 1 ? "" : "s"),
                                                  static_cast<int>(-from));
  return -least == INT64_MAX ? HostShare{} : HostShare{-least, limit};
}

std::int64_t usable_device_bytes(const device::Settings& settings, std::int64_t context_bytes,
                                 const parallel::World& world) {
  if (device::driver_total_bytes() == 0) return 0;
  std::int64_t taken = -(device::driver_total_bytes() - device::driver_bytes() + context_bytes);
  world.all().maximum({&taken, 1});
  const std::int64_t allowed = static_cast<std::int64_t>(settings.memory * 1e9);
  return allowed > 0 ? std::min(allowed, -taken) : -taken;
}

}  // namespace weft::run

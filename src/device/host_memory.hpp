// SPDX-License-Identifier: Apache-2.0
//
// Host memory that the processes of this node may still allocate.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace weft::device {

struct HostMemory {
  std::int64_t bytes = 0;  ///< 0: not known
  std::string limit;       ///< what limits it, for messages: "MemAvailable" or the memory limit of a control group
};

/// The least of MemAvailable in /proc/meminfo and of what the memory limits of this process' control groups leave
/// (version 1 and 2: a container, a job with a memory request). Pages of files count as free: the kernel drops them.
/// `root`: where /proc and /sys are found.
HostMemory available_host_memory(const std::filesystem::path& root = "/");

}  // namespace weft::device

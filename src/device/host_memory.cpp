// SPDX-License-Identifier: Apache-2.0
#include "device/host_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>

namespace weft::device {
namespace fs = std::filesystem;
namespace {

/// The number in a file; nothing if there is none ("max", no such file) or it stands for "no limit".
std::optional<std::int64_t> number_in(const fs::path& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;  // version 1 writes 2^63 less a page
  if (!(file >> value) || value >= kNoLimit) return std::nullopt;
  return value;
}

/// The sum of the numbers after these names in a file of "name number" lines.
std::int64_t sum_of(const fs::path& path, std::initializer_list<std::string_view> names) {
  std::ifstream file(path);
  std::int64_t sum = 0, value = 0;
  std::string name, rest;
  while (file >> name >> value && std::getline(file, rest))
    for (const std::string_view wanted : names)
      if (name == wanted) sum += value;
  return sum;
}

/// Names of the files of a memory controller.
struct Controller {
  const char *limit, *used, *active_files, *inactive_files;
};
constexpr Controller kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file",
                                  "total_inactive_file"};
constexpr Controller kVersion2 = {"memory.max", "memory.current", "active_file", "inactive_file"};

/// Lowers `memory` to what the limits of `group` and of all groups around it leave. In a container the group of this
/// process may be named as seen from outside: levels that do not exist in the container are skipped.
void apply_limits(HostMemory& memory, const fs::path& mounted, const fs::path& group, const Controller& names) {
  for (fs::path level = group.relative_path();; level = level.parent_path()) {
    const fs::path directory = mounted / level;
    const auto limit = number_in(directory / names.limit), used = number_in(directory / names.used);
    if (limit && used) {
      const std::int64_t files = sum_of(directory / "memory.stat", {names.active_files, names.inactive_files});
      const std::int64_t left = std::max<std::int64_t>(1, *limit - std::max<std::int64_t>(0, *used - files));
      if (memory.bytes == 0 || left < memory.bytes) memory = {left, "memory limit of the control group"};
    }
    if (level.empty()) return;
  }
}

}  // namespace

HostMemory available_host_memory(const fs::path& root) {
  HostMemory memory;
  std::ifstream meminfo(root / "proc/meminfo");
  std::string name, rest;
  for (std::int64_t kib = 0; meminfo >> name >> kib && std::getline(meminfo, rest);)
    if (name == "MemAvailable:") memory = {kib << 10, "MemAvailable"};
  std::ifstream groups(root / "proc/self/cgroup");  // lines "number:controllers:path"; version 2: "0::path"
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") apply_limits(memory, root / "sys/fs/cgroup", group, kVersion2);
    if (controllers.find(",memory,") != std::string::npos)
      apply_limits(memory, root / "sys/fs/cgroup/memory", group, kVersion1);
  }
  return memory;
}

}  // namespace weft::device

// SPDX-License-Identifier: Apache-2.0
#include "parallel/affinity.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <bitset>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "device/runtime.hpp"

namespace weft::parallel {
namespace {
namespace fs = std::filesystem;

using Mask = std::bitset<kMostCpus>;  // the kernel's format: one bit per CPU
static_assert(sizeof(Mask) == kMostCpus / 8);

int sharing = 0;       // 0: not bound yet
bool distant = false;  // from the GPU

Mask mask_of(const Cpus& cpus) {
  Mask mask;
  for (const int cpu : cpus) mask.set(static_cast<std::size_t>(cpu));
  return mask;
}

Cpus numbers_of(const Mask& mask) {
  Cpus cpus;
  for (int cpu = 0; cpu < kMostCpus; ++cpu)
    if (mask.test(static_cast<std::size_t>(cpu))) cpus.push_back(cpu);
  return cpus;
}

/// Mask of a thread; empty if the kernel does not provide it.
Mask mask_of_thread(pid_t thread) {
  Mask mask;
  if (::sched_getaffinity(thread, sizeof mask, reinterpret_cast<cpu_set_t*>(&mask)) != 0) mask.reset();
  return mask;
}

/// The first line of a file of sysfs; "" if there is none.
std::string line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// CPUs near the GPU of this process; empty without a GPU, or if the kernel does not provide them.
Mask near_gpu(const World& world) {
  const std::string bus = device::gpu_bus_id(world.node_rank());
  return bus.empty() ? Mask() : mask_of(cpus_of(line_of(fs::path("/sys/bus/pci/devices") / bus / "local_cpulist")));
}

/// Hardware threads of one core have one number: that of the first.
int core_of(int cpu) {
  const Cpus siblings =
      cpus_of(line_of(fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu)));
  return siblings.empty() ? cpu : siblings.front();
}

bool openmp_binds() {
  const char* const bind = std::getenv("OMP_PROC_BIND");
  if (bind != nullptr) return std::string_view(bind) != "false" && std::string_view(bind) != "FALSE";
  return std::getenv("OMP_PLACES") != nullptr || std::getenv("GOMP_CPU_AFFINITY") != nullptr;
}

/// All threads that exist; others inherit the mask of the thread that starts them.
void restrict_threads(const Mask& mask) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/task", ignored)) {
    const auto thread = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
    const Mask narrower = mask_of_thread(thread) & mask;
    const Mask& wanted = narrower.any() ? narrower : mask;
    // A failure for a thread that has ended in the meantime is ignored.
    ::sched_setaffinity(thread, sizeof wanted, reinterpret_cast<const cpu_set_t*>(&wanted));
  }
}

}  // namespace

std::string to_text(const Cpus& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (last > i) text += fmt::format("-{}", cpus[last]);
    i = last + 1;
  }
  return text;
}

Cpus cpus_of(const std::string& text) {
  Mask mask;
  const char *at = text.data(), *const end = at + text.size();
  while (at < end) {
    int first = -1, last = -1;
    std::from_chars_result read = std::from_chars(at, end, first);
    last = first;
    if (read.ptr < end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    for (int cpu = std::max(0, first); cpu <= std::min(last, kMostCpus - 1); ++cpu)
      mask.set(static_cast<std::size_t>(cpu));
    at = std::find(read.ptr, end, ',');
    if (at < end) ++at;
  }
  return numbers_of(mask);
}

std::vector<Cpus> divided(std::vector<Cpus> masks, const std::function<int(int cpu)>& core_of, int least) {
  const std::vector<Cpus> given = masks;
  const auto overlap = [](const Cpus& a, const Cpus& b) { return (mask_of(a) & mask_of(b)).any(); };
  for (std::size_t process = 0; process < given.size(); ++process) {
    const Cpus& all = given[process];
    std::size_t number = 0, together = 0;  // number of this process among those with this mask; number of these
    bool apart = true;                     // from all others
    for (std::size_t other = 0; other < given.size(); ++other) {
      number += other < process && given[other] == all;
      together += given[other] == all;
      apart = apart && (given[other] == all || !overlap(given[other], all));
    }
    if (together == 1 || !apart) continue;
    // The CPUs by cores: the hardware threads of a core stay together, unless there are fewer cores than processes.
    std::vector<std::pair<int, int>> by_core;  // core, CPU
    std::vector<std::size_t> begins;           // first entries of the cores
    for (const int cpu : all) by_core.emplace_back(core_of(cpu), cpu);
    std::sort(by_core.begin(), by_core.end());
    for (std::size_t i = 0; i < by_core.size(); ++i)
      if (i == 0 || by_core[i].first != by_core[i - 1].first) begins.push_back(i);
    if (begins.size() < together) {
      begins.clear();
      for (std::size_t i = 0; i < by_core.size(); ++i) begins.push_back(i);
    }
    const std::size_t each = begins.size() / together;
    begins.push_back(by_core.size());
    Cpus part;
    for (std::size_t i = begins[number * each]; i < begins[(number + 1) * each]; ++i) part.push_back(by_core[i].second);
    std::sort(part.begin(), part.end());
    if (each > 0 && static_cast<int>(part.size()) >= least) masks[process] = std::move(part);
  }
  return masks;
}

Cpus own_cpus() { return numbers_of(mask_of_thread(0)); }

int bind_to_cpus(const World& world, const device::Settings& settings) {
  if (sharing > 0) return sharing;
  Mask own = mask_of_thread(0);
  const bool binds = settings.affinity == "auto" && !openmp_binds();
  if (const Mask near = near_gpu(world); near.any()) {
    distant = (own & near).none();
    if (binds && !distant) own &= near;
  }
  std::vector<Mask> of_node(static_cast<std::size_t>(world.node_size()));
  world.node().all_gather(&own, of_node.data(), sizeof own);
  if (binds) {
    std::vector<Cpus> masks;
    for (const Mask& mask : of_node) masks.push_back(numbers_of(mask));
    masks = divided(std::move(masks), core_of, std::max(1, device::requested_threads(settings)));
    for (std::size_t i = 0; i < masks.size(); ++i) of_node[i] = mask_of(masks[i]);
    own = of_node[static_cast<std::size_t>(world.node_rank())];
    if (own.any()) restrict_threads(own);
  }
  sharing = static_cast<int>(
      std::count_if(of_node.begin(), of_node.end(), [&](const Mask& mask) { return (mask & own).any(); }));
  sharing = std::max(1, sharing);
  return sharing;
}

int processes_sharing_cpus(const World& world) { return sharing > 0 ? sharing : world.node_size(); }

std::string cpus_text() { return to_text(own_cpus()) + (distant ? " (none is near the GPU)" : ""); }

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
//
// The CPUs of each process. A launcher may leave all processes of a node on the same CPUs: their threads then compete
// for cores, and memory lies far from the GPU that reads it.
//
//   1. the mask that the launcher set
//   2. of it, the CPUs near the GPU of the process (sysfs: local_cpulist of its PCI device), if there are any
//   3. processes with equal masks divide them into equal parts of whole cores
//
// A mask is never widened, and masks that the launcher made disjoint are only narrowed by 2.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "device/device_settings.hpp"
#include "parallel/world.hpp"

namespace weft::parallel {

/// Numbers of CPUs, ascending.
using Cpus = std::vector<int>;

/// "0-3,8" <-> {0, 1, 2, 3, 8}, the format of the kernel. What is no list of CPUs below kMostCpus is left out.
constexpr int kMostCpus = 8192;
std::string to_text(const Cpus&);
Cpus cpus_of(const std::string& text);

/// The masks of the processes of a node (in their order) after step 3. Processes whose masks are equal, and overlap
/// with those of no other, get a part each, unless it has fewer CPUs than `least`. core_of: the number of a CPU's core.
std::vector<Cpus> divided(std::vector<Cpus> masks, const std::function<int(int cpu)>& core_of, int least);

/// CPUs that the calling thread may use.
Cpus own_cpus();

/// Restricts all threads of this process, and those that they will start, to its CPUs, unless device.affinity = "none"
/// or the environment makes OpenMP bind its threads (OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY). Once per process,
/// before it allocates what it computes with; later calls change nothing. Collective. Returns `processes_sharing_cpus`.
int bind_to_cpus(const World&, const device::Settings&);

/// Processes of this node with CPUs of this one, itself included. Before `bind_to_cpus`: all of them.
int processes_sharing_cpus(const World&);

/// The CPUs of this process, for the log: "0-3", "8-15 (none is near the GPU)".
std::string cpus_text();

}  // namespace weft::parallel

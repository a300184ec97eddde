// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"

#include <algorithm>
#include <map>
#include <mutex>

namespace weft::kernels {
namespace {

std::mutex mutex;
std::map<void*, Space> spaces;  // node-based: references stay valid on insertion

}  // namespace

const Space& space_of(const Execution& execution) {
  const std::lock_guard lock(mutex);
  const auto found = spaces.find(execution.stream);
  if (found != spaces.end()) return found->second;
#ifdef KOKKOS_ENABLE_CUDA
  return spaces.emplace(execution.stream, Space(static_cast<cudaStream_t>(execution.stream))).first->second;
#else
  return spaces.emplace(execution.stream, Space()).first->second;
#endif
}

void forget_spaces() {
  const std::lock_guard lock(mutex);
  spaces.clear();
}

#ifndef KOKKOS_ENABLE_CUDA
void run_teams(const Execution& execution, const char* name, std::int64_t count, std::size_t scratch_bytes,
               TeamFunction function, const void* body) {
  Kokkos::parallel_for(name, team_policy(execution, count, scratch_bytes),
                       [=](const Team& team) { function(body, team); });
}

void run_ranges(const Execution& execution, const char* name, std::int64_t count, RangeFunction function,
                const void* body) {
  const Space& space = space_of(execution);
  const std::int64_t n_ranges = std::min<std::int64_t>(count, space.concurrency());
  Kokkos::parallel_for(name, Kokkos::RangePolicy<Space>(space, 0, n_ranges),
                       [=](std::int64_t i) { function(body, count * i / n_ranges, count * (i + 1) / n_ranges); });
}
#endif

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"

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

}  // namespace weft::kernels

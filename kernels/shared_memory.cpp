// SPDX-License-Identifier: Apache-2.0
#include "kernels/shared_memory.hpp"

#include <algorithm>

namespace weft::kernels::cuda {

std::string shared_memory_obstacle(std::int64_t dynamic, std::int64_t variables, SharedMemoryOf where,
                                   std::int64_t of_device) {
  const bool everywhere = where == SharedMemoryOf::every_gpu && kSharedMemory < of_device;
  const std::int64_t limit = everywhere ? kSharedMemory : of_device;
  if (dynamic + variables <= limit) return {};
  return "a block asks for " + std::to_string(dynamic) + " bytes of dynamic shared memory and has " +
         std::to_string(variables) + " static bytes; " +
         (everywhere ? "GPUs of compute capability 8.6, 8.9 and 12.x, which it is for as well, have "
                     : "this GPU has ") +
         std::to_string(limit);
}

}  // namespace weft::kernels::cuda

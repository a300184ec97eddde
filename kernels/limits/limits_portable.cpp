// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "kernels/limits/limits.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {

void copy_memory(const Execution& execution, Array<const std::byte> from, Array<std::byte> to) {
  const Space& space = space_of(execution);
#ifdef KOKKOS_ENABLE_CUDA
  using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
  Kokkos::deep_copy(space, Kokkos::View<std::byte*, Space, Unmanaged>(to.data, static_cast<std::size_t>(to.size)),
                    Kokkos::View<const std::byte*, Space, Unmanaged>(from.data, static_cast<std::size_t>(from.size)));
#else
  // One piece per thread: long enough for memcpy to bypass the caches.
  const std::int64_t n_pieces = space.concurrency(), size = from.size;
  for_all(
      execution, "copy_memory", n_pieces, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t begin = size * i / n_pieces, end = size * (i + 1) / n_pieces;
        std::memcpy(to.data + begin, from.data + begin, static_cast<std::size_t>(end - begin));
      });
#endif
}

}  // namespace weft::kernels

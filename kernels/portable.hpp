// SPDX-License-Identifier: Apache-2.0
//
// What every *_portable.cpp shares. Included by nothing else: it brings Kokkos.
#pragma once

#include <Kokkos_Core.hpp>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels {

using Space = Kokkos::DefaultExecutionSpace;

inline Space space_of(const Execution& execution) {
#ifdef KOKKOS_ENABLE_CUDA
  return Space(static_cast<cudaStream_t>(execution.stream));
#else
  static_cast<void>(execution);
  return Space();
#endif
}

/// Turns counts in data[1 .. n] into offsets: data[i] = base + data[1] + ... + data[i], where data[0] = base on entry.
inline void offsets_from_counts(const Space& space, std::int64_t* data, std::int64_t n) {
  if (n == 0) return;
  Kokkos::parallel_scan(
      "offsets", Kokkos::RangePolicy<Space>(space, 0, n), KOKKOS_LAMBDA(std::int64_t i, std::int64_t & sum, bool last) {
        sum += data[i + 1];
        if (last) data[i + 1] = data[0] + sum;
      });
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Binary search inside a kernel.
#pragma once

#include <cstdint>

#include "kernels/portable.hpp"

namespace weft::kernels {

/// The first position in [begin, end) whose value is at least `least`; `end` if there is none. `values` ascend there.
template <class Values>
KOKKOS_FORCEINLINE_FUNCTION std::int64_t lower_bound(const Values& values, std::int64_t begin, std::int64_t end,
                                                     std::int64_t least) {
  while (begin < end) {
    const std::int64_t middle = begin + (end - begin) / 2;
    if (static_cast<std::int64_t>(values[middle]) < least)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Device memory of a run, from sizes alone. The plan lists it by purpose; the grids and the modes of private training
// are compared by it.
#pragma once

#include <cstdint>

#include "language_model/settings/configuration.hpp"

namespace weft::language_model {

/// GPU memory of a process of a CUDA build before its own allocations (docs/performance.md).
constexpr std::int64_t kContextBytes = std::int64_t{640} << 20;

/// Bytes of a run in addition to its state and the arena of a step.
struct OtherBytes {
  OtherBytes(const Configuration&, const Architecture&, kernels::Backend);
  std::int64_t positions = 0, samples = 0, samples_on_host = 0, context = kernels::kCudaBuild ? kContextBytes : 0;
  std::int64_t on_device() const { return positions + samples + context; }
};

/// Device memory (Plan::device_total()) of a run on this grid and backend. privacy.mode of a private run is not
/// automatic.
std::int64_t device_bytes(const Configuration&, const Architecture&, const parallel::GridShape&, kernels::Backend);

}  // namespace weft::language_model

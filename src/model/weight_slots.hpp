// SPDX-License-Identifier: Apache-2.0
//
// Memory of the weights of a model of which every rank of the data axis keeps a part (parallel.shard = "full"): those
// of a unit are gathered before it is computed and may be overwritten by those of another unit afterwards (UnitMemory).
// Only the plane that products read is gathered: of fp32 weights in two planes the upper one.
#pragma once

#include <span>

#include "model/step_arena.hpp"
#include "model/unit_memory.hpp"

namespace weft::model {

class WeightSlots {
 public:
  /// No slots.
  WeightSlots() = default;
  /// Slots for `rank` of a grid; block_slots: blocks whose weights are there at a time. Collective over the data axis.
  WeightSlots(std::span<const ParameterSpec> specs, const parallel::GridShape&, std::int64_t rank, kernels::StorageType,
              std::int64_t block_slots, StepArena&);

  const UnitMemory& units() const { return units_; }
  /// Bytes of the largest matrix.
  std::int64_t largest() const { return largest_; }
  std::byte* place(std::size_t parameter) const { return memory_.data() + units_.begin(parameter); }

 private:
  std::int64_t largest_ = 0;
  UnitMemory units_;
  parallel::ExchangeBuffer memory_;
};

}  // namespace weft::model

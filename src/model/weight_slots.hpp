// SPDX-License-Identifier: Apache-2.0
//
// Memory of the weights of a model of which every rank of the data axis keeps a part (parallel.shard = "full"): those
// of a unit are gathered before it is computed and may be overwritten by those of another unit afterwards (UnitMemory).
// Only the planes that are read are gathered (read_planes): of fp32 weights in two planes the upper one, or both where
// products read copies of the exact values.
#pragma once

#include <span>
#include <vector>

#include "model/step_arena.hpp"
#include "model/unit_memory.hpp"

namespace weft::model {

class WeightSlots {
 public:
  /// No slots.
  WeightSlots() = default;
  /// Slots for `rank` of a grid; block_slots: blocks whose weights are there at a time. Collective over the data axis.
  WeightSlots(std::span<const ParameterSpec> specs, const parallel::GridShape&, std::int64_t rank, kernels::StorageType,
              GatheredWeights, std::int64_t block_slots, StepArena&);

  const UnitMemory& units() const { return planes_.front(); }
  /// Bytes of the largest plane of a matrix; 0 without slots.
  std::int64_t largest() const { return largest_; }
  /// Where the weights of each parameter are gathered, by plane: for Parameters.
  const std::vector<std::vector<std::byte*>>& places() const { return places_; }

 private:
  std::int64_t largest_ = 0;
  std::vector<UnitMemory> planes_;  // those of the members of a group follow one another
  parallel::ExchangeBuffer memory_;
  std::vector<std::vector<std::byte*>> places_;
};

}  // namespace weft::model

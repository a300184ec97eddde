// SPDX-License-Identifier: Apache-2.0
#include "model/weight_slots.hpp"

#include <algorithm>

namespace weft::model {

WeightSlots::WeightSlots(std::span<const ParameterSpec> specs, const parallel::GridShape& grid, std::int64_t rank,
                         kernels::StorageType storage, std::int64_t block_slots, StepArena& arena)
    : units_(specs, block_slots, [&](std::size_t i) -> std::int64_t {
        if (!specs[i].is_matrix()) return 0;
        const Plane read = planes_of(specs[i], storage, arena.backend(), Moments::none).front();
        const std::int64_t rows = specs[i].rows_in_memory(row_parts(specs[i], grid, rank).held.size()),
                           bytes = rows * read.columns * kernels::bytes_of(read.type);
        largest_ = std::max(largest_, bytes);
        return bytes;
      }) {
  arena.purpose("gathered weights");
  memory_ = arena.exchange(parallel::kDataAxis, units_.bytes());
}

}  // namespace weft::model

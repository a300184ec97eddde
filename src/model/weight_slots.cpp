// SPDX-License-Identifier: Apache-2.0
#include "model/weight_slots.hpp"

#include <algorithm>

namespace weft::model {

WeightSlots::WeightSlots(std::span<const ParameterSpec> specs, const parallel::GridShape& grid, std::int64_t rank,
                         kernels::StorageType storage, GatheredWeights gathered, std::int64_t block_slots,
                         StepArena& arena) {
  std::vector<std::vector<std::int64_t>> bytes;  // by plane and parameter
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].is_matrix()) continue;
    const std::int64_t rows = specs[i].rows_in_memory(row_parts(specs[i], grid, rank).held.size());
    const std::vector<Plane> read = read_planes(specs[i], storage, arena.backend(), gathered);
    bytes.resize(std::max(bytes.size(), read.size()), std::vector<std::int64_t>(specs.size()));
    for (std::size_t plane = 0; plane < read.size(); ++plane) {
      bytes[plane][i] = rows * read[plane].columns * kernels::bytes_of(read[plane].type);
      largest_ = std::max(largest_, bytes[plane][i]);
    }
  }
  std::int64_t total = 0;
  for (const std::vector<std::int64_t>& of_plane : bytes) {
    planes_.emplace_back(specs, block_slots, [&](std::size_t i) { return of_plane[i]; });
    total += planes_.back().bytes();
  }
  arena.purpose("gathered weights");
  memory_ = arena.exchange(parallel::kDataAxis, total);
  std::byte* plane_begin = memory_.data();
  places_.resize(specs.size());
  for (std::size_t plane = 0; plane < bytes.size(); ++plane) {
    for (std::size_t i = 0; i < specs.size(); ++i)
      if (bytes[plane][i] > 0)
        places_[i].push_back(plane_begin == nullptr ? nullptr : plane_begin + planes_[plane].begin(i));
    if (plane_begin != nullptr) plane_begin += planes_[plane].bytes();
  }
}

}  // namespace weft::model

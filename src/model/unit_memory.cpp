// SPDX-License-Identifier: Apache-2.0
#include "model/unit_memory.hpp"

#include <algorithm>

namespace weft::model {
namespace {

/// Vector loads of kernels need aligned rows.
constexpr std::int64_t kAlignment = 256;

std::int64_t whole_lines(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

UnitMemory::UnitMemory(std::span<const ParameterSpec> specs, std::int64_t block_slots,
                       const std::function<std::int64_t(std::size_t)>& bytes_of)
    : begin_(specs.size()) {
  for (const ParameterSpec& spec : specs) last_unit_ = std::max(last_unit_, spec.unit);
  const std::size_t blocks = last_unit_ > 1 ? last_unit_ - 1 : 0;
  slots_ = 1 + std::min(blocks, static_cast<std::size_t>(block_slots));
  std::vector<std::int64_t> end_of_unit(last_unit_ + 1), bytes_of_slot(slots_);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::int64_t bytes = bytes_of(i);
    if (bytes == 0) continue;
    const bool continues = i > 0 && !specs[i].group.empty() && specs[i].group == specs[i - 1].group;
    std::int64_t& end = end_of_unit[specs[i].unit];
    begin_[i] = continues ? end : whole_lines(end);
    end = begin_[i] + bytes;
  }
  for (std::size_t unit = 0; unit <= last_unit_; ++unit) {
    std::int64_t& bytes = bytes_of_slot[slot_of(unit)];
    bytes = std::max(bytes, whole_lines(end_of_unit[unit]));
  }
  std::vector<std::int64_t> begin_of_slot;
  for (const std::int64_t bytes : bytes_of_slot) {
    begin_of_slot.push_back(bytes_);
    bytes_ += bytes;
  }
  for (std::size_t i = 0; i < specs.size(); ++i) begin_[i] += begin_of_slot[slot_of(specs[i].unit)];
}

std::size_t UnitMemory::slot_of(std::size_t unit) const {
  return unit == 0 || unit == last_unit_ ? 0 : 1 + (unit - 1) % (slots_ - 1);
}

}  // namespace weft::model

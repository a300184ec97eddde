// SPDX-License-Identifier: Apache-2.0
//
// Memory that the units of a model share (ParameterSpec::unit): the weights of a unit are there while it is computed,
// its gradients until they are with their owners.
//
//   unit 0          the tables before the blocks     slot 0
//   unit b + 1      block b                          slot 1 + b % block_slots
//   the last unit   the tables after the blocks      slot 0
//
// The place of a parameter never changes: recorded steps and views of the weights stay valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/parameters.hpp"

namespace weft::model {

class UnitMemory {
 public:
  UnitMemory() = default;
  /// bytes_of(i): those of matrix i in its slot; 0: it has no place. Members of a group follow one another.
  UnitMemory(std::span<const ParameterSpec> specs, std::int64_t block_slots,
             const std::function<std::int64_t(std::size_t)>& bytes_of);

  /// Bytes of all slots.
  std::int64_t bytes() const { return bytes_; }
  /// First byte of a parameter.
  std::int64_t begin(std::size_t parameter) const { return begin_[parameter]; }
  std::size_t slots() const { return slots_; }
  std::size_t slot_of(std::size_t unit) const;

 private:
  std::vector<std::int64_t> begin_;  // by parameter
  std::int64_t bytes_ = 0;
  std::size_t slots_ = 0, last_unit_ = 0;
};

}  // namespace weft::model

// SPDX-License-Identifier: Apache-2.0
//
// GPU memory whose address other ranks hold. Freed blocks are kept and reused until the group of ranks ends: a peer may
// still use the address.
//
// All ranks call `take` and `give` with the same sizes in the same order, and therefore find corresponding blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::parallel {

class KeptMemory {
 public:
  struct Block {
    void* data = nullptr;
    std::int64_t bytes = 0;
  };

  /// The smallest free block of at least `bytes`; with null data if there is none.
  Block take(std::int64_t bytes) {
    auto best = spare_.end();
    for (auto block = spare_.begin(); block != spare_.end(); ++block)
      if (block->bytes >= bytes && (best == spare_.end() || block->bytes < best->bytes)) best = block;
    if (best == spare_.end()) return {};
    const Block found = *best;
    spare_.erase(best);
    return found;
  }
  void give(const Block& block) { spare_.push_back(block); }
  const std::vector<Block>& spare() const { return spare_; }

 private:
  std::vector<Block> spare_;
};

}  // namespace weft::parallel

// SPDX-License-Identifier: Apache-2.0
//
// Memory of a GPU that other ranks have come to know. It is never given back before the group of ranks ends, but kept
// for the next who wants as much: a peer may still have its address.
//
// Calls are collective in effect: all ranks take and give the same sizes in the same order, so they find the same
// blocks.
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

  /// The smallest block that holds `bytes` and is not in use; without data when there is none.
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

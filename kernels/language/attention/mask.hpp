// SPDX-License-Identifier: Apache-2.0
//
// Which keys a row reads: an interval that ends with the row itself, less the blocks that sparse attention leaves out.
// One rule for the portable and the CUDA kernels.
#pragma once

#include "kernels/language/attention/attention.hpp"

namespace weft::kernels {

/// The mask of one sequence. Rows and keys are counted within it.
struct AttentionMask {
  const std::int32_t* first_key;  ///< of row 0, or null
  int window;                     ///< 0: none

  /// First key that `row` reads.
  WEFT_HOST_DEVICE int lower(int row) const {
    const int by_document = first_key != nullptr ? first_key[row] : 0;
    const int by_window = window > 0 ? row - window + 1 : 0;
    return by_document > by_window ? by_document : by_window;
  }
};

WEFT_HOST_DEVICE inline AttentionMask mask_of(const Attention& shape, std::int64_t sequence) {
  const std::int64_t window = shape.window < shape.length ? shape.window : 0;  // a longer one hides nothing
  return {shape.first_key.size > 0 ? shape.first_key.data + sequence * shape.length : nullptr,
          static_cast<int>(window)};
}

/// Blocks of keys that the blocks of queries of one head read.
struct KeptBlocks {
  const std::uint8_t* kept;  ///< null: all
  int blocks;

  /// True if the block of `query` reads the block of `key`. Rows are counted within the sequence.
  WEFT_HOST_DEVICE bool operator()(int query, int key) const {
    constexpr int kRows = static_cast<int>(kKeyBlock);
    return kept == nullptr || kept[std::int64_t{query / kRows} * blocks + key / kRows] != 0;
  }
};

WEFT_HOST_DEVICE inline KeptBlocks kept_of(const Attention& shape, std::int64_t sequence, std::int64_t head) {
  const std::int64_t blocks = (shape.length + kKeyBlock - 1) / kKeyBlock;
  return {shape.kept.size > 0 ? shape.kept.data + (sequence * shape.heads + head) * blocks * blocks : nullptr,
          static_cast<int>(blocks)};
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Which keys a row reads: an interval that ends with the row itself. One rule for the portable and the CUDA kernels.
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

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Keys and values that the attention of a later layer will read. While products wait for the kernel before them, memory
// is idle: they request these rows into the second-level cache of the GPU. This changes no result.
#pragma once

#include <cstddef>

#include "kernels/language/decode/cached_attention.hpp"

namespace weft::kernels {

/// `count` positions of each sequence that runs, from the `first`-th on that its attention reads from the cache.
/// Sequences and positions are read before a kernel's wait: cached_attention.hpp says what may write them.
struct CachedAhead {
  const CachedSequence* sequences = nullptr;                ///< [rows]
  const std::int32_t* positions = nullptr;                  ///< [rows], of the new rows
  const std::byte *keys = nullptr, *values = nullptr;       ///< row 0 of the caches
  std::int64_t stride = 0;                                  ///< bytes from a row to the next
  std::int32_t bytes = 0;                                   ///< of a row
  std::int32_t rows = 0, window = 0, first = 0, count = 0;  ///< window, as of CachedAttention; count 0: nothing

  /// The i-th of `parts` parts, of neighbouring positions.
  CachedAhead part(std::int32_t i, std::int32_t parts) const {
    CachedAhead one = *this;
    one.first += count * i / parts;
    one.count = count * (i + 1) / parts - count * i / parts;
    return one;
  }
};

/// What is worth requesting during the products between two layers: of the caches of the second. Nothing on the host.
CachedAhead cached_ahead(const Execution&, const CachedAttention&, AnyMatrix cached_keys, AnyMatrix cached_values);

/// Calls request(address) for every line of the second-level cache that thread `thread` of `threads` requests.
template <class Request>
WEFT_HOST_DEVICE void each_line_ahead(const CachedAhead& ahead, int thread, int threads, const Request& request) {
  constexpr int kLine = 128;  // bytes
  const int lines = (ahead.bytes + kLine - 1) / kLine, of_row = ahead.count * lines;
  for (int i = thread; i < ahead.rows * of_row; i += threads) {
    const int row = i / of_row, end = ahead.positions[row],
              lower = ahead.window > 0 && end >= ahead.window ? end - ahead.window + 1 : 0,
              position = lower + ahead.first + i % of_row / lines;
    const CachedSequence sequence = ahead.sequences[row];
    if (end >= sequence.end || position >= end) continue;
    const std::int64_t at = sequence.row(position) * ahead.stride + i % lines * kLine;
    request(ahead.keys + at);
    request(ahead.values + at);
  }
}

}  // namespace weft::kernels

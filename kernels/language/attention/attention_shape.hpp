// SPDX-License-Identifier: Apache-2.0
//
// A call of attention (attention.hpp) but for its matrices: sizes, mask and dropout.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// Rows of a block of sparse attention.
inline constexpr std::int64_t kKeyBlock = 64;

/// Masks of attention probabilities. One depends on (seed, step, layer, global row, head, key) alone, so that ranks,
/// micro-batches and recomputation draw the same one.
struct AttentionDropout {
  float probability = 0;
  std::uint32_t layer = 0;         ///< below kMostDropoutLayers
  std::int64_t first_row = 0;      ///< global index of row 0 in the step
  std::int64_t first_head = 0;     ///< number of head 0 in the model
  const AdamStep* step = nullptr;  ///< its seed and number, where the kernels run; null: no dropout
};
inline constexpr std::uint32_t kMostDropoutLayers = 1 << 14;

/// Implementation that computes a call. The forward pass of one implementation can be followed by the backward pass of
/// the other. recorded: the implementation that the algorithm table names for the shape (attention_records.hpp), else
/// own. cudnn: own where cuDNN does not take the call.
enum class AttentionImplementation { recorded, own, cudnn };

struct Attention {
  std::int64_t sequences = 0, length = 0;  ///< rows = sequences * length
  std::int64_t heads = 0, kv_heads = 0, head_size = 0;
  float scale = 0;          ///< > 0
  float softcap = 0;        ///< 0: none
  std::int64_t window = 0;  ///< 0: all earlier keys
  /// First row, counted within its sequence, that each row may read (start of its document), at most the row itself:
  /// [rows]. Empty: 0.
  Array<const std::int32_t> first_key = {};
  /// Sparse attention: != 0 where a block of kKeyBlock queries reads a block of keys, [sequences, heads, blocks(),
  /// blocks()] (select_key_blocks). Every block reads itself. Empty: all blocks.
  Array<const std::uint8_t> kept = {};
  AttentionDropout dropout = {};
  AttentionImplementation implementation = AttentionImplementation::recorded;

  std::int64_t rows() const { return sequences * length; }
  std::int64_t blocks() const { return (length + kKeyBlock - 1) / kKeyBlock; }
  /// Number of elements of `kept`.
  std::int64_t block_pairs() const { return sequences * heads * blocks() * blocks(); }
};

/// Largest head size; a multiple of 8.
inline constexpr std::int64_t kLargestHead = 256;

}  // namespace weft::kernels

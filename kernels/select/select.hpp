// SPDX-License-Identifier: Apache-2.0
//
// Exact selection of active features from pre-activations that pass by tile by tile.
//
// The rule (transcoder.md section 4.3). r = fp32(stored product + bias). Candidates are entries with r > 0, ordered by
// (r descending, then token, layer, feature ascending, all global). Of each group the first min(budget, #candidates) stay.
//   batch_topk  one group a layer (scope layer) or one for all (all_layers), over the whole batch; budget round(k N [L])
//   topk        one group a token and layer, or a token
//   relu        everything positive
// The bits of r > 0 are an unsigned integer that orders as r does: the key. Thresholds and histograms work on keys, so the
// search for the K-th largest is exact and a sum over ranks of integer counts.
//
// Batch selection on one rank. Tiles are filtered against a threshold key per group into CandidateLists; a histogram of what
// passed is taken. Over all ranks the K-th largest key T is then found in three rounds of 2048 bins (11 + 11 + 10 bits: keys
// have 31), and `take` keeps key > T and, of key == T, the first `admit[token, layer]` in feature order. The filter can cost
// another pass over the tiles, never change the result. `transcoder/selection` drives this.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/sparse/sparse.hpp"

namespace weft::kernels {

constexpr int kHistogramBins = 2048;
constexpr int kHistogramRounds = 3;

/// Order-preserving key of r; 0 for everything that is not positive (also NaN: finiteness is judged elsewhere).
WEFT_HOST_DEVICE inline std::uint32_t selection_key(float r) { return r > 0.0f ? float_bits(r) : 0u; }

/// Where the bins of a round lie in a key: round 0 takes bits 30..20, round 1 bits 19..9, round 2 bits 8..0.
WEFT_HOST_DEVICE constexpr int histogram_shift(int round) { return round == 0 ? 20 : round == 1 ? 9 : 0; }

/// Candidates of this rank, appended tile by tile. A segment is one tile's part of one token: `segment_begin` of tile i has
/// the first candidate of each of its tokens. Tiles come layer by layer, feature blocks ascending, tokens ascending.
struct CandidateLists {
  Array<std::uint32_t> key;              ///< [capacity] layer * F + feature (F: features on this rank)
  Array<float> value;                    ///< [capacity] r
  Array<std::int64_t> segment_begin;     ///< [n_segments + 1], n_segments = sum over tiles of their tokens
  std::int64_t* count = nullptr;         ///< entries that passed the filter so far, stored or not
};

/// One tile of products with what places it.
struct Tile {
  AnyMatrix product;                     ///< [tokens, features] fp32 or bf16
  Array<const float> bias;               ///< [features] of this tile
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;          ///< first token (rank-local index)
  std::int64_t feature_begin = 0;        ///< first feature (rank-local index)
  std::int64_t segment = 0;              ///< first of the tile's segments
};

/// What passes: key > threshold, or key == threshold and the entry is among the first admit[token, layer] ties of its token and
/// layer in feature order (admit.data == nullptr: every tie passes). threshold is one key per group (layer or all).
struct Filter {
  Array<const std::uint32_t> threshold;  ///< [n_layers] (all equal for scope all_layers)
  Matrix<const std::int32_t> admit;      ///< [tokens, n_layers] or null
  Matrix<std::int32_t> tie_cursor;       ///< [tokens, n_layers] ties met so far, zeroed by the caller before the first tile; null with admit
};

/// Filters one tile into `lists`. Entries beyond the capacity are counted, not stored (then lists.count > capacity and the
/// caller filters again with a higher threshold). histogram, if not null: [n_groups, 2048] round-0 bins of what passed, added to.
/// group_of_layer = 0 for scope all_layers, the layer for scope layer.
void filter_tile(const Execution&, const Tile&, std::int64_t n_features, const Filter&, CandidateLists lists,
                 Matrix<std::int64_t> histogram, std::int64_t group);

/// Counts without storing: histogram[group, bin] += keys of the tile whose bits above the round's bins equal `prefix`, by the
/// round's bins. Used to find a local threshold when candidates overflow.
void histogram_tile(const Execution&, const Tile&, int round, std::uint32_t prefix, Matrix<std::int64_t> histogram,
                    std::int64_t group);

/// ties[token, layer] += keys of the tile equal to `key`.
void count_ties_tile(const Execution&, const Tile&, std::uint32_t key, Matrix<std::int32_t> ties);

/// The same over stored candidates, for all groups at once. prefix [n_groups]; layer_groups: one group a layer.
void histogram_candidates(const Execution&, const CandidateLists&, std::int64_t count, std::int64_t n_features,
                          bool layer_groups, int round, Array<const std::uint32_t> prefix, Matrix<std::int64_t> histogram);

/// ties[token, layer] = stored candidates equal to their group's threshold. Overwrites ties [N, n_layers].
void count_ties(const Execution&, const CandidateLists&, std::int64_t n_tokens, std::int64_t n_layers,
                std::int64_t n_features, std::span<const Tile> tiles, Array<const std::uint32_t> threshold,
                Matrix<std::int32_t> ties);

}  // namespace weft::kernels

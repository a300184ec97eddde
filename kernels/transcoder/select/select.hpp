// SPDX-License-Identifier: Apache-2.0
//
// Exact selection of active features from pre-activations that pass by tile by tile.
//
// The rule (Weft's own; the peers' differ). r = fp32(stored product + bias). Candidates are entries with r > 0, ordered
// by (r descending, then token, layer, feature ascending, all global). Of each group the first min(budget, #candidates)
// stay.
//   batch_topk  one group a layer (scope layer) or one for all (all_layers), over the whole batch; budget round(k N
//   [L]) topk        one group a token and layer, or a token relu        everything positive
// The bits of r > 0 are an unsigned integer that orders as r does: the key. Thresholds and histograms work on keys, so
// the search for the K-th largest is exact and a sum over ranks of integer counts.
//
// Here are the steps on one rank; transcoder/selection.hpp says how they make a selection over all ranks. Every list
// has a fixed order, so results are the same bits whatever the number of threads.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// Order-preserving key of r; 0 for everything that is not positive (also NaN: finiteness is judged elsewhere).
WEFT_HOST_DEVICE inline std::uint32_t selection_key(float r) { return r > 0.0f ? float_bits(r) : 0u; }
constexpr std::uint32_t kLargestKey = 0x7f800000u;  ///< of infinity

/// A key is searched in three rounds of at most 2048 bins: bits 30..20, 19..9, 8..0.
constexpr int kHistogramRounds = 3;
constexpr int kHistogramBins = 2048;
WEFT_HOST_DEVICE constexpr int histogram_shift(int round) { return round == 0 ? 20 : round == 1 ? 9 : 0; }
WEFT_HOST_DEVICE constexpr int histogram_width(int round) { return round == 2 ? 9 : 11; }

/// The keys of one round: those whose bits above the round's bins equal `prefix` (round 0: 0).
struct HistogramRound {
  int round = 0;
  std::uint32_t prefix = 0;

  /// The bin of a key, -1 when it is not of this round or not a candidate.
  WEFT_HOST_DEVICE int bin(std::uint32_t key) const {
    const int shift = histogram_shift(round), width = histogram_width(round);
    if (key == 0 || (key >> (shift + width)) != prefix) return -1;
    return static_cast<int>((key >> shift) & ((1u << width) - 1u));
  }
};

/// One tile of products with what places it. Token and features are indices of this rank.
struct Tile {
  AnyMatrix product;        ///< [tokens, features] fp32 or bf16
  Array<const float> bias;  ///< [features] of this tile
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t feature_begin = 0;
};

// ---- over the batch ------------------------------------------------------------------------------------------------

/// What passed the filter, in the order (layer, feature block, token, feature): one segment for each of the first
/// three. The tiles of a feature block all have its features, and their tokens cover all tokens in ascending order.
struct CandidateLists {
  std::int64_t n_tokens = 0;
  std::int64_t n_layers = 0;
  std::int64_t n_blocks = 0;          ///< feature blocks of a layer
  std::int64_t n_features = 0;        ///< per layer, on this rank
  Array<std::uint32_t> key;           ///< [capacity] layer * n_features + feature
  Array<float> value;                 ///< [capacity] r
  Array<std::int64_t> segment_begin;  ///< [n_layers * n_blocks * n_tokens + 1]; the caller sets the first to 0

  WEFT_HOST_DEVICE std::int64_t segment(std::int64_t layer, std::int64_t block, std::int64_t token) const {
    return (layer * n_blocks + block) * n_tokens + token;
  }
};

/// What passes: key > threshold; with `admit` also key == threshold for the first admit(token, layer) of its token and
/// layer.
struct Filter {
  std::uint32_t threshold = 0;
  Matrix<const std::int32_t> admit;  ///< [tokens, n_layers] or null
  Matrix<std::int32_t> admitted;     ///< [tokens, n_layers] or null: ties let in so far; zero before the first tile
};

/// Appends what passes to the lists. Entries beyond their capacity are counted in segment_begin, not stored.
void filter_tile(const Execution&, const Tile&, std::int64_t block, const Filter&, const CandidateLists&);

/// histogram [2048] += the tile's keys of this round, by bin.
void histogram_tile(const Execution&, const Tile&, HistogramRound, Array<std::int64_t> histogram);

/// ties(token, layer) += keys of the tile equal to `key` (> 0).
void count_ties_tile(const Execution&, const Tile&, std::uint32_t key, Matrix<std::int32_t> ties);

/// histogram [2048] += keys of the stored candidates of layers [layer_begin, layer_end), by bin.
void histogram_candidates(const Execution&, const CandidateLists&, std::int64_t layer_begin, std::int64_t layer_end,
                          HistogramRound, Array<std::int64_t> histogram);

/// ties [tokens, n_layers] = stored candidates equal to threshold[layer]. Overwrites.
void count_ties(const Execution&, const CandidateLists&, Array<const std::uint32_t> threshold,
                Matrix<std::int32_t> ties);

/// The candidates with key > threshold[layer], and of those equal to it the first admit(token, layer) in feature order
/// (null admit: all), as CSR. Sets all arrays of `activations`, whose sizes the caller has set.
void take_candidates(const Execution&, const CandidateLists&, Array<const std::uint32_t> threshold,
                     Matrix<const std::int32_t> admit, const SparseActivations& activations);

// ---- per token -----------------------------------------------------------------------------------------------------

/// An entry with its place in the order, as one word: larger words come first, no two are equal. 0 is no entry.
WEFT_HOST_DEVICE inline std::uint64_t selection_word(std::uint32_t key, std::uint32_t index) {
  return static_cast<std::uint64_t>(key) << 32 | (0xffffffffu - index);
}

/// The best words so far of each (token, group), a row each, as a heap with the least in front. `index` of a word is
/// layer * n_features_total + global feature.
struct BestLists {
  std::int64_t n_groups = 0;          ///< rows of a token: layers, or 1
  std::int64_t n_features_total = 0;  ///< per layer, over all ranks
  std::int64_t feature_offset = 0;    ///< global index of this rank's first feature
  Matrix<std::uint64_t> word;         ///< [tokens * n_groups, budget], zeroed by the caller before the first tile
};

/// Layers ascending, and features ascending within a layer (ties at the least word lose to what is there).
void keep_best_tile(const Execution&, const Tile&, const BestLists&);

/// cut_off[row] = the budget-th largest word of `n_lists` lists of the same rows, which lie one after the other in
/// `words`
/// ([n_lists * rows, budget], each row a heap); 0 when there are fewer. Overwrites the first list.
void merge_best(const Execution&, Matrix<std::uint64_t> words, std::int64_t n_lists, Array<std::uint64_t> cut_off);

/// Words >= cut_off[row] (null: all) as CSR. Destroys the lists; sets all arrays of `activations`.
void take_best(const Execution&, const BestLists&, Array<const std::uint64_t> cut_off,
               const SparseActivations& activations);

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Exact selection of active features from pre-activations that are computed tile by tile and never stored whole: the
// portable kernels. The rule is in selection_rule.hpp; transcoder/selection/host_selector.hpp combines these steps into
// a selection over all ranks. Every list has a fixed order, so results have the same bits for any number of threads.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// One tile of products and its position. Token and feature are indices of this rank.
struct Tile {
  AnyMatrix product;        ///< [tokens, features] fp32 or bf16
  Array<const float> bias;  ///< [features] of this tile
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t feature_begin = 0;
  Array<const float> bounds = {};  ///< [features] of this tile; without data: the filter's threshold
};

// ---- selection over the batch --------------------------------------------------------------------------------------

/// Entries that passed the filter, in the order (layer, feature block, token, feature): one segment for each (layer,
/// feature block, token). Every tile of a feature block has all its features, and the tiles' tokens ascend.
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

/// Condition for an entry to be listed: key > threshold or, if the tile has bounds, r > bounds. With `admit` the first
/// admit(token, layer) entries of each token and layer with key == threshold are listed, too.
struct Filter {
  std::uint32_t threshold = 0;
  Matrix<const std::int32_t> admit;  ///< [tokens, n_layers] or null
  Matrix<std::int32_t> admitted;     ///< [tokens, n_layers] or null: ties admitted so far; zero before the first tile
};

/// Appends the entries that pass the filter to the lists. Entries beyond their capacity are counted in segment_begin,
/// not stored.
void filter_tile(const Execution&, const Tile&, std::int64_t block, const Filter&, const CandidateLists&);

/// Adds the tile's keys of this round to histogram [2048], by bin.
void histogram_tile(const Execution&, const Tile&, HistogramRound, Array<std::int64_t> histogram);

/// Adds the number of keys of the tile equal to `key` (> 0) to ties(token, layer).
void count_ties_tile(const Execution&, const Tile&, std::uint32_t key, Matrix<std::int32_t> ties);

/// Adds the keys of the stored candidates of layers [layer_begin, layer_end) to histogram [2048], by bin.
void histogram_candidates(const Execution&, const CandidateLists&, std::int64_t layer_begin, std::int64_t layer_end,
                          HistogramRound, Array<std::int64_t> histogram);

/// Overwrites ties [tokens, n_layers] with the number of stored candidates equal to threshold[layer].
void count_ties(const Execution&, const CandidateLists&, Array<const std::uint32_t> threshold,
                Matrix<std::int32_t> ties);

/// Writes as CSR the candidates with key > threshold[layer] and, among those equal to it, the first admit(token, layer)
/// in feature order (null admit: all). Sets all arrays of `activations`, whose sizes the caller has set.
void take_candidates(const Execution&, const CandidateLists&, Array<const std::uint32_t> threshold,
                     Matrix<const std::int32_t> admit, const SparseActivations& activations);

// ---- selection per token -------------------------------------------------------------------------------------------

/// The best words (selection_rule.hpp) so far, one list per (token, group), as a heap with the least word in front. A
/// word's index counts n_features_total features per layer.
struct BestLists {
  std::int64_t n_groups = 0;          ///< rows of a token: layers, or 1
  std::int64_t n_features_total = 0;  ///< per layer, over all ranks
  std::int64_t feature_offset = 0;    ///< global index of this rank's first feature
  Matrix<std::uint64_t> word;         ///< [tokens * n_groups, budget], zeroed by the caller before the first tile
};

/// Merges a tile into the lists. Must be called for ascending layers, and ascending features within a layer: an entry
/// equal to the least word is not taken.
void keep_best_tile(const Execution&, const Tile&, const BestLists&);

/// Sets cut_off[row] to the budget-th largest word among `n_lists` lists of the same rows; 0 if there are fewer.
/// `words`: [n_lists * rows, budget], list after list, each row a heap. Overwrites the first list.
void merge_best(const Execution&, Matrix<std::uint64_t> words, std::int64_t n_lists, Array<std::uint64_t> cut_off);

/// Writes the words >= cut_off[row] (null: all) as CSR. Overwrites the lists; sets all arrays of `activations`.
void take_best(const Execution&, const BestLists&, Array<const std::uint64_t> cut_off,
               const SparseActivations& activations);

}  // namespace weft::kernels

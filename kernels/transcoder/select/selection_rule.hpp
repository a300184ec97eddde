// SPDX-License-Identifier: Apache-2.0
//
// The rule by which activations of a batch are selected, and the arithmetic of the search for them. Host and device use
// the same functions, in the portable kernels (select.hpp) and in the hand-written ones (select_cuda.hpp).
//
// r = fp32(stored product + bias). Candidates are entries with r > 0, ordered by (r descending, then token, layer and
// feature ascending, all indices global). Of each group the first min(K, #candidates) are selected.
//
// clang-format off
//   rule         groups, by scope layer | all_layers          K, with k = entries per token (and layer)
//   batch_topk   one per layer          | one                 round(k N) | round(k N L), N tokens of the whole batch
//   topk         one per token and layer| one per token       round(k)   | round(k L)
//   relu         -                                            every candidate
//   jumprelu     -                                            every r above the bound of its feature  (activation/),
//                                                             which may be negative
// clang-format on
//
// The bits of r > 0, read as an unsigned integer, order as r does: the key. Thresholds and histograms work on keys, so
// the search for the K-th largest is exact, and sums over ranks are sums of integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"

namespace weft::kernels {

/// Selection rules of the table above; relu with bounds (Tile::bounds, DeviceSelection::select) is jumprelu.
enum class SelectionRule { batch_topk, topk, relu };

/// Returns K of a group with `n_layers` layers (1 for scope layer) and `n_tokens` tokens (1 for topk). Halves round up;
/// at least 1.
inline std::int64_t selection_budget(double k, std::int64_t n_layers, std::int64_t n_tokens) {
  return std::max<std::int64_t>(1, std::llround(k * static_cast<double>(n_layers) * static_cast<double>(n_tokens)));
}

/// Statistics of a selection, equal on all ranks except for entries, candidates and passes.
struct SelectionStatistics {
  std::vector<float> threshold;          ///< K-th value of each group; 0 if fewer than K are positive (batch_topk only)
  std::int64_t entries = 0;              ///< active entries of this rank
  std::int64_t passes = 0;               ///< passes over the tiles begun on this rank, usually 1
  std::int64_t ties_cut = 0;             ///< entries at a K-th value that are not selected (batch_topk)
  std::int64_t redos = 0;                ///< portable driver: times that all ranks began again after a high threshold
  std::vector<std::int64_t> candidates;  ///< CUDA driver: entries of each group that passed the last filter
  bool overflow = false;                 ///< CUDA driver: more entries than a list holds; the rest is lost
};

// ---- order ----------------------------------------------------------------------------------------------------------

/// Order-preserving key of r; 0 for everything that is not positive, NaN included (finiteness is checked elsewhere).
WEFT_HOST_DEVICE inline std::uint32_t selection_key(float r) { return r > 0.0f ? float_bits(r) : 0u; }
constexpr std::uint32_t kLargestKey = 0x7f800000u;  ///< key of infinity

/// An entry and its position in the order as one word: larger words come first, no two are equal, 0 is no entry.
/// `index` = layer * features per layer + feature, both global: of equal keys in a token the lower index comes first.
WEFT_HOST_DEVICE constexpr std::uint64_t selection_word(std::uint32_t key, std::uint32_t index) {
  return static_cast<std::uint64_t>(key) << 32 | (0xffffffffu - index);
}
WEFT_HOST_DEVICE constexpr std::uint32_t key_of_word(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 32);
}
WEFT_HOST_DEVICE constexpr std::uint32_t index_of_word(std::uint64_t word) {
  return 0xffffffffu - static_cast<std::uint32_t>(word);
}

// ---- search for the K-th key ----------------------------------------------------------------------------------------

/// Rounds of the search for a key, of at most 2048 bins each: bits 30..20, 19..9, 8..0.
constexpr int kHistogramRounds = 3;
constexpr int kHistogramBins = 2048;
WEFT_HOST_DEVICE constexpr int histogram_shift(int round) { return round == 0 ? 20 : round == 1 ? 9 : 0; }
WEFT_HOST_DEVICE constexpr int histogram_width(int round) { return round == 2 ? 9 : 11; }

/// The keys of one round: those whose bits above the round's bins equal `prefix` (0 in round 0).
struct HistogramRound {
  int round = 0;
  std::uint32_t prefix = 0;

  /// Bin of a key; -1 if it is not of this round or not a candidate.
  WEFT_HOST_DEVICE constexpr int bin(std::uint32_t key) const {
    const int shift = histogram_shift(round), width = histogram_width(round);
    if (key == 0 || (key >> (shift + width)) != prefix) return -1;
    return static_cast<int>((key >> shift) & ((1u << width) - 1u));
  }
};

/// Finds the highest bin such that it and the bins above hold at least `rank` keys (>= 1); -1 if all hold fewer.
template <class Count>
struct PickedBin {
  int bin;
  Count above;   ///< keys in the bins above it (bin -1: all)
  Count inside;  ///< keys in the bin
};

template <class Count>
PickedBin<Count> pick_bin(const Count* histogram, Count rank) {
  PickedBin<Count> picked{kHistogramBins - 1, 0, 0};
  while (picked.bin >= 0 && picked.above + histogram[picked.bin] < rank) picked.above += histogram[picked.bin--];
  if (picked.bin >= 0) picked.inside = histogram[picked.bin];
  return picked;
}

/// The search for the K-th key of a group through the rounds. `Count` is an integer of 64 bits.
template <class Count>
struct KeySearch {
  Count wanted = 0;          ///< K
  Count greater = 0;         ///< keys with larger upper bits than the K-th (exhausted: all)
  Count inside = 0;          ///< keys with the upper bits of the K-th; after the last round its ties, itself included
  std::uint32_t prefix = 0;  ///< upper bits of the K-th key, as far as they are known
  int rounds = 0;            ///< number of finished rounds
  bool exhausted = false;    ///< there are fewer than K keys: all count

  /// The keys that the next round counts.
  WEFT_HOST_DEVICE HistogramRound round() const { return {rounds, prefix}; }
  /// Rank of the K-th key among the keys of the next round.
  WEFT_HOST_DEVICE Count rank() const { return wanted - greater; }
  /// Continues the search with the bin of `rank()` in the histogram of `round()`.
  WEFT_HOST_DEVICE void advance(const PickedBin<Count>& picked) {
    if (exhausted) return;
    greater += picked.above;
    inside = picked.inside;
    exhausted = picked.bin < 0;  // only possible in the first round
    if (!exhausted) prefix = prefix << histogram_width(rounds) | static_cast<std::uint32_t>(picked.bin);
    ++rounds;
  }
  /// The least key with the prefix; after the last round the K-th key. 0: every candidate counts.
  WEFT_HOST_DEVICE std::uint32_t key() const { return exhausted ? 0 : prefix << histogram_shift(rounds - 1); }
  /// Number of keys that reach key().
  WEFT_HOST_DEVICE Count reaching() const { return greater + inside; }
  /// The threshold that exactly the keys from key() on exceed.
  WEFT_HOST_DEVICE std::uint32_t threshold() const { return key() == 0 ? 0 : key() - 1; }
  /// Number of entries at the K-th key that are selected, and of those that are not. Valid after the last round.
  WEFT_HOST_DEVICE Count ties_kept() const { return wanted - greater; }
  WEFT_HOST_DEVICE Count ties_cut() const { return exhausted ? 0 : reaching() - wanted; }
};

/// Returns how many of `ties` entries at the K-th key, with `before` others ahead of them, are among the first `kept`.
/// Ties are selected in the order (token, layer, feature).
template <class Count>
WEFT_HOST_DEVICE constexpr Count ties_admitted(Count ties, Count before, Count kept) {
  return before >= kept ? 0 : ties < kept - before ? ties : kept - before;
}

// ---- filter threshold of the next batch
// ------------------------------------------------------------------------------------

/// The filter threshold of the next batch, slightly below the K-th key of this one: it aims at 1.375 K entries. Near
/// the K-th value the logarithm of the rank falls about linearly with the value; the line from the threshold of this
/// batch is followed to the wanted rank. Any threshold gives the same result; a bad one costs a second pass.
/// `threshold`: that of this batch, the same on all ranks; 0: none. `passed`: entries of all ranks above it, if `known`
/// (too many for the list of some rank are not counted: the distance to the K-th key is then quartered). Thresholds are
/// checkpointed.
WEFT_HOST_DEVICE inline std::uint32_t next_threshold(std::uint32_t kth_key, std::uint32_t threshold, bool known,
                                                     std::uint64_t passed, std::uint64_t wanted) {
  constexpr float kLogTarget = 0.31845f;  // log(1.375)
  const float kth = bits_float(kth_key), now = bits_float(threshold);
  float next = 0;
  if (kth_key == kLargestKey) return kLargestKey - 1;  // infinite: no distance can be formed
  if (!known) {
    next = threshold > 0 && threshold < kth_key ? fmaxf(kth - 0.25f * (kth - now), 0.95f * kth) : 0.95f * kth;
  } else if (passed > wanted) {
    const float growth = logf(static_cast<float>(passed) / static_cast<float>(wanted));
    next = kth - kLogTarget * (kth - now) / fmaxf(growth, 1e-6f);
    next = fminf(fmaxf(next, 0.93f * kth), 0.9999f * kth);
  } else if (passed == wanted) {
    next = 0.98f * now;
  }
  return selection_key(next);
}

}  // namespace weft::kernels

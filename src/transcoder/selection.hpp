// SPDX-License-Identifier: Apache-2.0
//
// Which activations of a batch stay: exact, over all ranks, from pre-activations that are never stored whole.
//
// The rule is in kernels/select/select.hpp. It says nothing about ranks, and so does the result: for given products the
// set and its values are the same bits on every grid.
//
// batch_topk. Each rank filters its tiles against one threshold key a group (a layer, or everything) into a bounded
// list. Too many: the tiles are made again, a histogram of their keys gives a threshold that at least K of this rank's
// entries reach (the K-th key of one rank is never above that of all ranks), and if ties alone still overflow, only the
// first of them in (token, layer, feature) order enter. Then three rounds of 2048-bin histograms, summed over all
// ranks, give the exact K-th key; ties at it are granted by exchanged counts per (token, layer). The first threshold
// comes from the last step (slightly below its K-th key): it is part of the checkpoint so that time repeats too, but it
// can only cost a second pass.
//
//   bytes a rank sends per step   3 * groups * 2048 * 8, and when ties must be cut N/D * L * 4 on the feature axis
//
// topk. Each rank keeps the best `budget` entries of each token (and layer); on the feature axis each rank merges the
// lists of a slice of the tokens and returns a cut-off per token (and layer): N/D * groups * (budget + 1) * 8 bytes.
//
// relu. Everything positive: no communication.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "device/memory.hpp"
#include "kernels/select/select.hpp"
#include "kernels/sparse/sparse.hpp"
#include "parallel/grid.hpp"
#include "transcoder/configuration.hpp"

namespace weft::transcoder {

/// Sizes over all ranks; the grid gives this rank's part of them.
struct SelectionShape {
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;  ///< per layer
  std::int64_t max_tokens = 0;  ///< of the largest batch
};

/// What a selection needs on each rank (the largest rank where parts are uneven): for the memory plan and for the
/// trainer's own buffers.
struct SelectionSizes {
  std::int64_t capacity = 0;       ///< entries of the sparse activations, enough for every input
  std::int64_t tile_tokens = 0;    ///< a tile of products has at most this many tokens ...
  std::int64_t tile_features = 0;  ///< ... and features: about 8 MiB
  std::int64_t device_bytes = 0;   ///< all buffers of Selection, where the kernels run
  std::int64_t host_bytes = 0;     ///< staging on the host

  std::int64_t max_tokens = 0;    ///< tokens of one feature group
  std::int64_t max_features = 0;  ///< per layer, of one rank
  std::int64_t n_groups = 0;      ///< of batch_topk over the batch, of topk per token
  std::int64_t candidates = 0;    ///< batch_topk, relu: entries that may pass the filter
  std::int64_t segments = 0;      ///< batch_topk, relu: (layer, feature block, token) lists of candidates
  std::int64_t best = 0;          ///< topk: entries kept for each token and group
};

/// Throws a collective Error(usage) when the lists would need more than 2^32 entries.
SelectionSizes selection_sizes(const ModelSettings&, const SelectionShape&, parallel::GridShape, Precision);

/// Entries wanted of each group: batch_topk round(k n) or round(k n L) for n tokens of the whole batch, topk round(k)
/// or round(k L); halves go up. relu: the largest integer.
std::int64_t selection_budget(const ModelSettings&, std::int64_t n_layers, std::int64_t n_tokens_total);

/// What the last selection did. The same on all ranks except where it says "this rank".
struct SelectionStatistics {
  std::vector<float> threshold;  ///< per group: the K-th value; 0 when fewer than K are positive (batch_topk only)
  std::int64_t entries = 0;      ///< active entries of this rank
  std::int64_t passes = 0;       ///< passes over the tiles begun on this rank: 1 is the rule
  std::int64_t redos = 0;        ///< times that a threshold was too high and all ranks began again
  std::int64_t ties_cut = 0;     ///< entries at a K-th value that did not fit the budget
  std::int64_t bytes_sent = 0;   ///< handed to the communicators by this rank
};

/// One rectangle of products to make: rank-local indices.
struct TileRequest {
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int64_t feature_begin = 0;
  std::int64_t feature_count = 0;
};

class Selection {
 public:
  /// Fills `product` [token_count, feature_count], on the stream of the execution. Called again for the same tile it
  /// must give the same bits.
  using Producer = std::function<void(const TileRequest&, kernels::AnyMatrix product)>;

  Selection(const ModelSettings&, const SelectionShape&, const parallel::Grid&, const kernels::Execution&, Precision);

  /// Collective over the grid. n_tokens_total: tokens of this batch over all ranks, at most max_tokens; this rank has
  /// grid.group_tokens(n_tokens_total). bias_of_layer: L arrays of this rank's features, on the device.
  void select(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer, const Producer&);

  /// The result of `select`, until the next one.
  const kernels::SparseActivations& activations() const { return activations_; }
  /// The same entries by feature; `transpose` makes them from the last selection (evaluation can do without).
  void transpose();
  const kernels::FeatureHits& hits() const { return hits_; }

  const SelectionStatistics& statistics() const { return statistics_; }
  const SelectionSizes& sizes() const { return sizes_; }

  /// The filter's threshold key of each group for the next batch (empty but for batch_topk): goes into the checkpoint.
  /// Any content is safe.
  std::span<std::uint32_t> controller_state() { return controller_; }

 private:
  ModelSettings settings_;
  SelectionShape shape_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  SelectionSizes sizes_;
  SelectionStatistics statistics_;
  std::vector<std::uint32_t> controller_;
  kernels::SparseActivations activations_;
  kernels::FeatureHits hits_;
};

}  // namespace weft::transcoder

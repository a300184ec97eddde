// SPDX-License-Identifier: Apache-2.0
//
// Encode and select on one GPU without the host: from tiles of products to the CSR of kernels/sparse/sparse.hpp.
//
// The rule is that of kernels/select/select.hpp, bit for bit: r = fp32(stored product + bias), candidates r > 0, the
// first min(budget, #candidates) of each group by (r descending, token, layer, feature ascending).
//
// batch_topk. Every tile is made once and read once: what exceeds its group's threshold goes into a list. The threshold
// comes from the batch before and aims at 1.375 budgets; when it let too few or too many pass, a loop on the device
// makes the tiles again, with histograms of all keys, until a threshold is known that fits (at most six times; keys
// that tie in greater numbers than the list holds are admitted in order by counts for each token). Then three rounds of
// histograms over the list find the K-th key exactly, ties are granted by counts in order, and the list becomes rows.
// So a threshold, whatever it is, can cost time and never changes the result.
//
// topk. A block of threads owns a token's row of a tile and its list of the best `budget` entries. It collects what
// exceeds a hint (a low percentile of the last batch's budget-th keys) in shared memory; when that is not enough it
// reads the row again without. No loop over tiles.
//
// relu. Everything positive, as long as it fits; `overflow` says when it did not.
//
// Several ranks. Each works on its features and tokens; what they tell each other is left to the caller
// (SelectionExchange), so nothing here knows how. The result is that of one rank, bit for bit.
//   batch_topk  After the first pass the counts of what passed are added up. Budget reached: all that is wanted passed,
//               and a list that fits is done. Not reached: each rank goes on alone until its list reaches its own K-th
//               key, which is never above that of all. So no loop over tiles waits for anybody. Then the histograms of
//               each round are added up, ties are counted for each (token, layer) and shared out over shards of the
//               features and slices of the batch in their order, and the thresholds of the next batch come from the
//               sums: they are the same on all ranks.
//   topk        Each shard keeps its own best; the lists of a slice of the tokens go to one shard, which returns from
//               where on an entry stays.
//   relu        Nothing to say.
//
// Order. Places in the lists are reserved by an integer atomic, so they vary; what stands there is found through one
// (begin, count) for each token, layer and feature block, so the result does not. It is the same bits in every run.
//
// Where time goes and how far each part is from its limit: docs/performance.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/constants.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels::cuda {

enum class SelectionRule { batch_topk, topk, relu };

/// Entries that `topk` keeps at most for a token and group: its list lies in shared memory.
constexpr std::int64_t kMostPerToken = 8192;

/// Where a rank stands among several: which features it has, and which slice of the batch. Slices follow one another,
/// and so do the features of shards.
struct SelectionPlace {
  std::int64_t feature_ranks = 1;
  std::int64_t feature_index = 0;
  std::int64_t data_ranks = 1;
  std::int64_t data_index = 0;
  std::int64_t feature_begin = 0;     ///< this rank's first feature
  std::int64_t n_features_total = 0;  ///< per layer, of all ranks; 0: this rank's
};

/// What ranks tell each other. Each call is collective and enqueues on the execution's stream; none is inside a loop of
/// a graph. One rank needs none of them; a grid of one shard, only `sum`.
struct SelectionExchange {
  /// Device values become their sums over all ranks of the grid.
  std::function<void(const Execution&, Array<std::int64_t> values)> sum;
  /// Over the shards of this rank's slice: piece i of `data` (bytes[i] long, one after the other) is filled by shard i.
  std::function<void(const Execution&, void* data, std::span<const std::int64_t> bytes)> all_gather;
  /// Over the same: piece i of `send` goes to shard i; pieces lie one after the other on both sides.
  std::function<void(const Execution&, const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                     std::span<const std::int64_t> receive_bytes)>
      all_to_all;
};

/// What a selection works on. Sizes are of one rank and of the largest batch.
struct SelectionRequest {
  SelectionRule rule = SelectionRule::batch_topk;
  bool all_layers = false;  ///< one group for all layers together (of a token, for topk); else one a layer
  std::int64_t n_tokens = 0;
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;  ///< per layer; a shard may have none
  std::int64_t budget = 0;      ///< entries wanted of each group by all ranks, at most; relu: entries expected in all
  Scalar product = Scalar::bf16;
  std::int64_t tile_tokens = 0;    ///< 0: all
  std::int64_t tile_features = 0;  ///< 0: all; else rounded up to a multiple of 8
  SelectionPlace place;            ///< alone, unless said otherwise
};

/// One rectangle of products to make, in this rank's indices.
struct TileRange {
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int64_t feature_begin = 0;
  std::int64_t feature_count = 0;
};

/// What the last selection did; read back by `DeviceSelection::report`. Of all ranks, but for candidates and passes.
struct SelectionReport {
  std::vector<float> threshold;          ///< of each group: the K-th value; 0 when fewer than the budget are positive
  std::vector<std::int64_t> candidates;  ///< of each group: entries of this rank that passed the last filter
  std::int64_t passes = 0;               ///< times that this rank's tiles were made
  std::int64_t ties_cut = 0;             ///< entries at a K-th value that did not fit the budget (batch_topk)
  bool overflow = false;                 ///< relu: more positive entries than the list holds; the rest is lost
};

class DeviceSelection {
 public:
  /// Enqueues the products of a tile into `product` [token_count, feature_count] on the execution's stream. Asked again
  /// for the same tile it must give the same bits. Its rows start at multiples of 16 bytes.
  using Producer = std::function<void(const Execution&, const TileRange&, AnyMatrix product)>;

  /// Bytes of device memory that a selection works in.
  static std::int64_t workspace_bytes(const SelectionRequest&);

  /// The workspace is aligned to 256 bytes and belongs to this selection as long as it lives: the thresholds of the
  /// next batch are in it. Enqueues their initial state. Throws Error(usage) for sizes it cannot do.
  DeviceSelection(const SelectionRequest&, Array<std::byte> workspace, const Execution&, SelectionExchange = {});
  ~DeviceSelection();
  DeviceSelection(const DeviceSelection&) = delete;
  DeviceSelection& operator=(const DeviceSelection&) = delete;

  /// Enqueues a selection of the first n_tokens tokens (0 is possible for a slice of several). bias_of_layer: L arrays
  /// [n_features] on the device. Sets all arrays of `activations` but entries beyond its capacity. While the stream is
  /// captured, all of it goes into the graph, with a conditional loop for repeated passes (CUDA 12.4); otherwise the
  /// host waits for the first pass to see whether there must be another.
  void select(const Execution&, std::int64_t n_tokens, std::int64_t budget,
              std::span<const Array<const float>> bias_of_layer, const Producer&, const SparseActivations& activations);

  /// The key (select.hpp) of each group that an entry must exceed to enter the list of the next batch, on the device:
  /// part of a checkpoint, so that time repeats too. Any content is safe. 0xffffffff: unknown.
  Array<std::uint32_t> thresholds() const;

  /// Waits for the stream. Throws Error(internal) when the producer did not repeat a tile's bits.
  SelectionReport report(const Execution&) const;

  struct Parts;

 private:
  Parts* parts_;
};

}  // namespace weft::kernels::cuda

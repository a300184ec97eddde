// SPDX-License-Identifier: Apache-2.0
//
// Encode and select on one GPU without the host: from tiles of products to the CSR of kernels/transcoder/sparse.
//
// The rule is in selection_rule.hpp; the result has the same bits as that of the portable kernels.
//
// batch_topk. Every tile is computed once and read once: entries above their group's threshold are appended to a list.
// The threshold comes from the batch before and aims at 1.375 budgets. If too few or too many entries passed, a loop on
// the device computes the tiles again, with histograms of all keys, until a threshold is known that fits (at most six
// times; if more keys tie than the list holds, they are admitted in order by counts for each token). Then three rounds
// of histograms over the list find the K-th key exactly, ties are admitted by counts in order, and the list becomes
// rows. So a threshold affects the time only, never the result.
//
// topk. One block of threads owns a token's row of a tile and its list of the best `budget` entries. It finds the
// largest keys of parts of the row, which bound the budget-th key from below, and reads those parts again that have
// keys above the bound. Nothing is carried from batch to batch.
//
// relu. All positive entries, as far as the list holds them; with bounds (jumprelu) all entries above the bound of
// their feature.
//
// A selection that is not valid (SelectionFailure) never writes outside its lists and sets a flag on the device.
//
// Several ranks. Each works on its features and tokens; the caller provides the collectives (SelectionExchange). The
// result has the same bits as that of one rank.
//   batch_topk  After the first pass the counts of entries that passed are summed. If they reach the budget, every
//               selected entry has passed, and a list that fits is complete. If not, each rank continues alone until
//               its list reaches its own K-th key, which is never above that of all ranks, so the loop over tiles
//               contains no exchange. Then the histograms of each round are summed, those of the last round for each
//               slice of the batch, so that all ranks know how many ties each slice has: of a slice all of them, none,
//               or those of its first tokens stay. Only in the last case the shards of that slice exchange counts for
//               each token, and then those of each layer of the one token that keeps a part of its ties, which are
//               distributed in order. The thresholds of the next batch follow from the sums and are the same on all
//               ranks.
//   topk        Each shard keeps its own best entries; the lists of a slice of the tokens go to one shard, which
//               returns a cut-off for each list.
//   relu        No exchange.
//
// Order. Positions in the lists are reserved with an integer atomic, so they vary from run to run. Entries are found
// through one (begin, count) for each token, layer and feature block, so the result does not vary.
//
// docs/performance.md has the time of each part and its distance from the hardware limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/select/select_request.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels::cuda {

/// Collectives between ranks. Each call enqueues on the execution's stream; none is inside a loop of a graph. A single
/// rank calls none of them, a grid with one shard only `sum`.
struct SelectionExchange {
  /// Replaces device values by their sums over all ranks of the grid.
  std::function<void(const Execution&, Array<std::int64_t> values)> sum;
  /// Gathers over the shards of this rank's slice: shard i fills piece i of `data` (bytes[i] long, one after the
  /// other).
  std::function<void(const Execution&, void* data, std::span<const std::int64_t> bytes)> all_gather;
  /// Gathers pieces of equal size over these shards. *needed is on the device and equal on all of them: 0 if no shard
  /// reads what it would receive, so that nothing need be sent.
  std::function<void(const Execution&, const std::uint32_t* needed, Array<std::uint32_t> data)> all_gather_if;
  /// Exchanges pieces between these shards: piece i of `send` goes to shard i; pieces are consecutive on both sides.
  std::function<void(const Execution&, const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                     std::span<const std::int64_t> receive_bytes)>
      all_to_all;
};

class DeviceSelection {
 public:
  /// Enqueues the products of a tile into `product` [token_count, feature_count] on the execution's stream. Repeated
  /// for the same tile it must give the same bits. Rows of `product` start at multiples of 16 bytes.
  using Producer = std::function<void(const Execution&, const TileRange&, AnyMatrix product)>;

  /// Bytes of device memory for the workspace. Throws Error(usage) for sizes that are not supported.
  static std::int64_t workspace_bytes(const SelectionRequest&);

  /// The workspace is aligned to 256 bytes and belongs to this selection during its lifetime: it contains the
  /// thresholds of the next batch. Enqueues their initial state. Throws Error(usage) for sizes that are not supported.
  DeviceSelection(const SelectionRequest&, Array<std::byte> workspace, const Execution&, SelectionExchange = {});
  ~DeviceSelection();
  DeviceSelection(const DeviceSelection&) = delete;
  DeviceSelection& operator=(const DeviceSelection&) = delete;

  /// Enqueues a selection of the first n_tokens tokens (0 is possible with several slices). bias_of_layer: L arrays
  /// [n_features] on the device. Sets all arrays of `activations`, but no entries beyond its capacity. While the stream
  /// is captured, all of it goes into the graph, with a conditional loop for repeated passes (CUDA 12.4); otherwise the
  /// host waits for the first pass to learn whether there must be another. Sets *fault, on the device, to 1 if the
  /// result is not valid (else leaves it); null: the caller reads the statistics. bounds_of_layer: L arrays
  /// [n_features]; with relu only. operands: the operands of the producer's products. If the GPU, their type and the
  /// sizes allow, batch_topk and relu form and filter them in one kernel (hopper_filter.hpp) and do not call the
  /// producer.
  void select(const Execution&, std::int64_t n_tokens, std::int64_t budget,
              std::span<const Array<const float>> bias_of_layer, const Producer&, const SparseActivations& activations,
              std::int32_t* fault = nullptr, std::span<const Array<const float>> bounds_of_layer = {},
              const EncoderOperands* operands = nullptr);

  /// True if the last `select` formed the products of its operands and did not store them.
  bool forms_products() const;

  /// Replace `select` with SelectionRequest::follows (topk only): call begin; then `take` for every tile of another
  /// selection with the same sizes and batch as it produces them (whole passes or parts of passes, each from the first
  /// tile on; the last one whole); then finish. `take` launches kernels alone, so it may be part of a captured loop.
  void begin(const Execution&, std::int64_t n_tokens, std::int64_t budget,
             std::span<const Array<const float>> bias_of_layer);
  void take(const Execution&, const TileRange&, AnyMatrix product);
  void finish(const Execution&, const SparseActivations& activations);

  /// Filter thresholds on the device: for each group the key (selection_rule.hpp) that an entry of the next batch must
  /// exceed to enter the list; not for topk. They are part of a checkpoint, so that a resumed run also takes the same
  /// time. Any content gives the same result. 0xffffffff: unknown.
  Array<std::uint32_t> thresholds() const;

  /// Returns the first selection since construction that was not valid. Waits for the stream.
  SelectionFailure first_failure(const Execution&) const;

  /// Returns the statistics of the last selection, without `entries` and `redos`. Waits for the stream. Throws
  /// Error(internal) if the producer did not repeat a tile's bits.
  SelectionStatistics statistics(const Execution&) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft::kernels::cuda

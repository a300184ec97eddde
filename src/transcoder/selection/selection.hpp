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
//
// On GPUs the whole selection runs there (kernels/select/select_cuda.hpp), by the same steps but for two: tiles are
// made again only by ranks whose list needs it, with nothing exchanged in between, and ties are always counted.
//
//   bytes a rank sends per step   8 * (groups * (3 * 2048 + D + 6)) to be summed, and N/D * L * 4 on the feature axis
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/memory.hpp"
#include "kernels/transcoder/select/select.hpp"
#include "kernels/transcoder/select/select_cuda.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "parallel/device_communicator.hpp"
#include "parallel/grid.hpp"
#include "transcoder/configuration.hpp"

namespace weft::transcoder {

/// Sizes over all ranks; the grid gives this rank's part of them.
struct SelectionShape {
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;  ///< per layer
  std::int64_t max_tokens = 0;  ///< of the largest batch
  std::int64_t tile_bytes = 0;  ///< products made at a time; 0: as many as suit the backend
  ExchangeManner manner = {};
};

/// What a selection needs on each rank (the largest rank where parts are uneven): for the memory plan and for the
/// trainer's own buffers.
struct SelectionSizes {
  std::int64_t capacity = 0;       ///< entries of the sparse activations, enough for every input
  std::int64_t tile_tokens = 0;    ///< a tile of products has at most this many tokens ...
  std::int64_t tile_features = 0;  ///< ... and features
  std::int64_t device_bytes = 0;   ///< all buffers of Selection, where the kernels run
  std::int64_t host_bytes = 0;     ///< staging on the host
  std::int64_t staged_bytes = 0;   ///< of them, those of the communicator of the feature axis (several GPUs)
  bool on_rank_0 = false;  ///< the selection is made by rank 0 (transcoder/selection_on_rank_0.hpp), which needs
  std::int64_t rank_0_device_bytes = 0, rank_0_host_bytes = 0;  ///< these beside

  std::int64_t max_tokens = 0;    ///< tokens of one feature group
  std::int64_t max_features = 0;  ///< per layer, of one rank
  std::int64_t n_groups = 0;      ///< of batch_topk over the batch, of topk per token
  std::int64_t candidates = 0;    ///< batch_topk, relu: entries that may pass the filter
  std::int64_t segments = 0;      ///< batch_topk, relu: (layer, feature block, token) lists of candidates
  std::int64_t best = 0;          ///< topk: entries kept for each token and group
  std::int64_t on_gpu_bytes = 0;  ///< workspace of a selection that runs on the GPU; 0: it does not
};

/// SelectionSizes::capacity.
std::int64_t list_capacity(const ModelSettings&, const SelectionShape&, const parallel::GridShape&);

/// Throws a collective Error(usage) when the lists would need more than 2^32 entries (with a data axis also those that
/// a rank makes of the features it owns, data_axis.hpp).
SelectionSizes selection_sizes(const ModelSettings&, const SelectionShape&, const parallel::GridShape&, Precision,
                               kernels::Backend);

/// Entries wanted of each group: batch_topk round(k n) or round(k n L) for n tokens of the whole batch, topk round(k)
/// or round(k L); halves go up, at least 1. relu: the largest integer.
std::int64_t selection_budget(const ModelSettings&, std::int64_t n_layers, std::int64_t n_tokens_total);

/// What the last selection did. The same on all ranks except where it says "this rank".
struct SelectionStatistics {
  std::vector<float> threshold;  ///< per group: the K-th value; 0 when fewer than K are positive (batch_topk only)
  std::int64_t entries = 0;      ///< active entries of this rank
  std::int64_t passes = 0;       ///< passes over the tiles begun on this rank: 1 is the rule
  std::int64_t redos = 0;        ///< times that a threshold was too high and all ranks began again
  std::int64_t ties_cut = 0;     ///< candidates at a K-th value that the budget does not hold
};

/// One rectangle of products to make: rank-local indices.
struct TileRequest {
  std::int64_t layer = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_count = 0;
  std::int64_t feature_begin = 0;
  std::int64_t feature_count = 0;
};

class SelectionOnRankZero;

class Selection {
 public:
  /// Fills `product` [token_count, feature_count], on the stream of the given execution. Called again for the same tile
  /// it must give the same bits.
  using Producer = std::function<void(const kernels::Execution&, const TileRequest&, kernels::AnyMatrix product)>;

  Selection(const ModelSettings&, const SelectionShape&, const parallel::Grid&, const kernels::Execution&, Precision);
  Selection(const Selection&) = delete;
  Selection& operator=(const Selection&) = delete;
  ~Selection();

  /// Collective over the grid. n_tokens_total: tokens of this batch over all ranks, at most max_tokens; this rank has
  /// grid.part(parallel::kDataAxis, n_tokens_total). bias_of_layer: L arrays of this rank's features, on the device.
  void select(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer, const Producer&);

  /// The result of `select`, until the next one.
  const kernels::SparseActivations& activations() const { return activations_; }
  /// The same entries by feature; `transpose` makes them from the last selection (evaluation can do without).
  void transpose();
  const kernels::FeatureHits& hits() const { return hits_; }

  /// Of the last selection. Waits for the device.
  const SelectionStatistics& statistics();
  const SelectionSizes& sizes() const { return sizes_; }
  /// Where a selection on GPUs waits for other ranks is marked from now on.
  void mark(device::IdleClock*);

  /// All under the name "selection". Of a rank, since the start.
  parallel::Exchanges exchanges() const;
  /// As DeviceCommunicator's.
  void observe(const parallel::ExchangeObserver*);

  /// The filter's threshold key of each group for the next batch (empty but for batch_topk): goes into the checkpoint.
  /// Any content is safe.
  struct ControllerState {
    kernels::Array<std::uint32_t> keys;
    bool on_device;
  };
  ControllerState controller_state();

 private:
  /// Every array, cut from one piece of memory on the device and one on the host.
  struct Arrays {
    Arrays(const SelectionSizes&, const ModelSettings&, const SelectionShape&, const parallel::GridShape&, Precision,
           kernels::Backend, void* device, void* host);

    kernels::AnyMatrix tile;                   // [tile_tokens, tile_features]
    kernels::Array<std::int64_t> row_offsets;  // the result: CSR ...
    kernels::Array<std::uint32_t> key;
    kernels::Array<float> value;
    kernels::Array<std::int64_t> hit_offsets;  // ... and CSC
    kernels::Array<std::uint32_t> hit_token;
    kernels::Array<std::uint32_t> hit_position;
    kernels::Array<std::byte> transpose_workspace;
    kernels::Array<std::byte> on_gpu_workspace;
    // batch_topk, relu
    kernels::Array<std::uint32_t> candidate_key;
    kernels::Array<float> candidate_value;
    kernels::Array<std::int64_t> segment_begin;
    kernels::Array<std::int64_t> histogram;              // [n_groups, bins]
    kernels::Array<std::uint32_t> threshold;             // [n_layers]
    kernels::Array<std::int32_t> ties, admit, admitted;  // [tokens, n_layers]
    // topk
    kernels::Array<std::uint64_t> best;           // [tokens, n_groups, best]
    kernels::Array<std::uint64_t> best_received;  // [feature ranks, tokens of a slice, n_groups, best]
    kernels::Array<std::uint64_t> cut_off_slice;  // [tokens of a slice, n_groups]
    kernels::Array<std::uint64_t> cut_off;        // [tokens, n_groups]

    struct {
      kernels::Array<std::int64_t> count;      // [1]
      kernels::Array<std::int64_t> histogram;  // [n_groups * bins + 1]: the last counts ranks
      kernels::Array<std::uint32_t> threshold;
      kernels::Array<std::int32_t> admit;  // [tokens, n_layers]
      kernels::Array<std::int32_t> ties;   // [feature ranks, tokens, n_layers]
      kernels::Array<std::uint64_t> best, best_received, cut_off_slice, cut_off;
    } host;

    std::int64_t device_bytes = 0;
    std::int64_t host_bytes = 0;
  };
  /// What one call of `select` works on.
  struct Batch {
    std::int64_t n_tokens = 0;  ///< of this rank's feature group
    parallel::Range features;   ///< of this rank, global indices
    std::int64_t budget = 0;
    std::int64_t n_blocks = 0;
    std::span<const kernels::Array<const float>> bias;
    const Producer* produce = nullptr;
  };
  struct Search;
  friend SelectionSizes selection_sizes(const ModelSettings&, const SelectionShape&, const parallel::GridShape&,
                                        Precision, kernels::Backend);

  template <class Visit>
  bool for_each_tile(const Batch&, Visit&&);
  kernels::CandidateLists candidates(const Batch&) const;
  std::int64_t group_of(std::int64_t layer) const { return sizes_.n_groups == 1 ? 0 : layer; }

  // By the portable kernels: selection_portable.cpp.
  void select_over_batch(const Batch&);
  bool collect(const Batch&, std::span<const std::uint32_t> guess);
  bool filter_tiles(const Batch&, std::span<const std::uint32_t> threshold, bool ordered);
  std::vector<Search> search_own_tiles(const Batch&);
  std::vector<Search> search_candidates(const Batch&, bool complete, bool& overflow);
  bool admit_ties(const Batch&, std::span<const Search>);
  void take_candidates(const Batch&, std::span<const Search>, bool ties_are_cut);
  void select_per_token(const Batch&);
  void select_on_gpu(const Batch&);
  kernels::cuda::SelectionExchange exchange();
  std::int64_t reduced_bytes(std::int64_t n_words) const;

  static constexpr const char* kName = "selection";  // of its exchanges
  /// call(begin, size) for `size` words of histograms: all at once, or one histogram after the other where each
  /// collective is to have one thing to do (parallel.together).
  template <class Call>
  void in_pieces(std::int64_t size, Call&& call) const {
    const std::int64_t piece = shape_.manner.together ? size : kernels::kHistogramBins;
    for (std::int64_t begin = 0; begin < size; begin += piece) call(begin, std::min(piece, size - begin));
  }

  ModelSettings settings_;
  SelectionShape shape_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  SelectionSizes sizes_;
  device::Allocation device_memory_;
  device::Allocation host_memory_;
  Arrays arrays_;
  std::vector<std::uint32_t> controller_;
  parallel::Exchanges exchanges_;                             // of a selection on the host
  std::optional<parallel::DeviceCommunicator> shards_, all_;  // the feature axis and all ranks, for `on_gpu_`
  // Null where the host takes part. Shared only because a build without CUDA must not name its destructor.
  std::shared_ptr<kernels::cuda::DeviceSelection> on_gpu_;
  std::unique_ptr<SelectionOnRankZero> on_rank_0_;
  parallel::Traffic host_traffic_;    // calls that do not go through a DeviceCommunicator
  std::vector<std::int64_t> passed_;  // per group: entries of all ranks that passed the filter
  SelectionStatistics statistics_;
  kernels::SparseActivations activations_;
  kernels::FeatureHits hits_;
};

}  // namespace weft::transcoder

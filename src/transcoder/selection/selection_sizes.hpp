// SPDX-License-Identifier: Apache-2.0
//
// Sizes of a selection, and the memory of a selector.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "model/step_arena.hpp"
#include "parallel/grid.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// What is selected, over all ranks.
struct SelectionSpec {
  ModelSettings settings;  ///< k: the largest one of the run
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;  ///< per layer
  std::int64_t max_tokens = 0;  ///< tokens of the largest batch
  parallel::GridShape grid;
  Precision precision = Precision::fp32;  ///< of the products
  kernels::Backend backend = kernels::Backend::portable;
  std::int64_t tile_bytes = 0;  ///< bytes of products computed at a time; 0: chosen for the backend
  parallel::ExchangeStrategy exchange = {};
  const SelectorFactory* factory = nullptr;  ///< null: the drivers of this folder
  bool follows = false;  ///< takes the tiles of another selector (Selector::follow): no memory for its own

  kernels::Scalar product() const {
    return precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32;
  }
};

/// Returns the selection of batches of at most `max_tokens` tokens over all ranks. Capacities do not depend on the
/// backend.
SelectionSpec selection_spec(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t max_tokens,
                             kernels::Backend = kernels::Backend::portable);
/// Returns the selection of dead features (transcoder.auxk), which follows that of `selection_spec`.
SelectionSpec dead_feature_selection(SelectionSpec);

/// What follows from a SelectionSpec on a rank: the largest rank where parts are uneven.
struct SelectionSizes {
  /// Throws a collective Error(usage) if the lists would need more than 2^32 entries; with a data axis also the lists
  /// of the features that a rank updates (axes/data_axis.hpp). Needs no device and no other ranks.
  explicit SelectionSizes(const SelectionSpec&);

  std::int64_t max_tokens;     ///< tokens of one data group
  std::int64_t max_features;   ///< features per layer
  std::int64_t n_groups;       ///< groups of the batch (batch_topk) or of a token (topk)
  std::int64_t capacity;       ///< entries of the sparse activations (list_capacity)
  std::int64_t tile_tokens;    ///< a tile of products has at most this many tokens ...
  std::int64_t tile_features;  ///< ... and features
};

/// Returns SelectionSizes::capacity. relu and jumprelu keep any number of entries: settings.capacity bounds it.
std::int64_t list_capacity(const SelectionSpec&);
/// Returns the capacity of the lists of the features that a rank updates, over the tokens of the whole batch
/// (axes/data_axis.hpp): enough for all entries that the lists of all groups can hold.
std::int64_t owned_list_capacity(const SelectionSpec&);

/// Returns K of each group (kernels/transcoder/select/selection_rule.hpp) for n_tokens_total tokens of the whole batch;
/// relu, jumprelu: the largest integer.
std::int64_t selection_budget(const ModelSettings&, std::int64_t n_layers, std::int64_t n_tokens_total);

/// Memory of the portable driver. Arrays that the activation does not use have size 0.
struct HostSelectorBuffers {
  kernels::AnyMatrix tile;  ///< [tile_tokens, tile_features]
  // batch_topk, relu, jumprelu
  kernels::Array<std::uint32_t> candidate_key;  ///< [candidates]
  kernels::Array<float> candidate_value;
  kernels::Array<std::int64_t> segment_begin;          ///< [layers * feature blocks * tokens + 1]
  kernels::Array<std::int64_t> histogram;              ///< [n_groups, bins]
  kernels::Array<std::uint32_t> threshold;             ///< [n_layers]
  kernels::Array<std::int32_t> ties, admit, admitted;  ///< [tokens, n_layers]
  // topk
  kernels::Array<std::uint64_t> best;           ///< [tokens, n_groups, budget]
  kernels::Array<std::uint64_t> best_received;  ///< [feature ranks, tokens of a slice, n_groups, budget]
  kernels::Array<std::uint64_t> cut_off_slice;  ///< [tokens of a slice, n_groups]
  kernels::Array<std::uint64_t> cut_off;        ///< [tokens, n_groups]

  struct {
    kernels::Array<std::int64_t> count;      ///< [1]
    kernels::Array<std::int64_t> histogram;  ///< [n_groups * bins + 1]: the last one counts ranks whose list overflowed
    kernels::Array<std::uint32_t> threshold;
    kernels::Array<std::int32_t> admit;  ///< [tokens, n_layers]
    kernels::Array<std::int32_t> ties;   ///< [feature ranks, tokens, n_layers]
    kernels::Array<std::uint64_t> best, best_received, cut_off_slice, cut_off;
  } on_host;

  std::int64_t budget_of_token = 0;  ///< topk: columns of the lists
};

/// Memory of a selector: of its result, and of the driver that the spec requires (drivers.cpp).
struct SelectionBuffers {
  SelectionBuffers(const SelectionSpec&, model::StepArena&);

  SelectionSizes sizes;
  kernels::Array<std::int64_t> row_offsets;  ///< CSR
  kernels::Array<std::uint32_t> key;
  kernels::Array<float> value;
  kernels::Array<std::int64_t> hit_offsets;  ///< CSC
  kernels::Array<std::uint32_t> hit_token;
  kernels::Array<std::uint32_t> hit_position;
  kernels::Array<std::byte> transpose_workspace;
  kernels::Array<std::int64_t> n_entries;  ///< [1], host
  HostSelectorBuffers host;
  kernels::Array<std::byte> device;  ///< workspace of the driver of the CUDA kernels
};

}  // namespace weft::transcoder

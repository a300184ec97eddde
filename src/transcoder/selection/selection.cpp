// SPDX-License-Identifier: Apache-2.0
//
// Sizes of a selection, and the code that all drivers share.
#include "transcoder/selection/selection.hpp"

#include <algorithm>
#include <limits>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"

namespace weft::transcoder {
namespace {

using kernels::activation_keeps_k;
using kernels::Array;

}  // namespace

SelectionShape selection_shape(const Configuration& configuration, const Shape& shape, std::int64_t max_tokens) {
  return {shape.n_layers,
          shape.n_features,
          max_tokens,
          configuration.tile << 20,
          configuration.parallel.exchange,
          configuration.alternatives.selector};
}

ModelSettings selection_of_dead_features(const ModelSettings& settings) {
  ModelSettings dead = settings;
  dead.activation = Activation::topk;
  dead.scope = Scope::layer;
  dead.k_initial = 0;
  dead.k = static_cast<double>(std::min(settings.auxk_features, settings.features));
  return dead;
}

std::int64_t selection_budget(const ModelSettings& settings, std::int64_t n_layers, std::int64_t n_tokens_total) {
  if (!activation_keeps_k(settings.activation)) return std::numeric_limits<std::int64_t>::max();
  return kernels::selection_budget(settings.k, settings.scope == Scope::all_layers ? n_layers : 1,
                                   settings.activation == Activation::batch_topk ? n_tokens_total : 1);
}

std::int64_t list_capacity(const ModelSettings& settings, const SelectionShape& shape,
                           const parallel::GridShape& grid) {
  const std::int64_t n_groups = settings.scope == Scope::layer ? shape.n_layers : 1;
  const std::int64_t budget = selection_budget(settings, shape.n_layers, shape.max_tokens);
  const std::int64_t n_tokens = parallel::largest_part(shape.max_tokens, grid.size(parallel::kDataAxis)),
                     per_token = shape.n_layers / n_groups *
                                 parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  if (!activation_keeps_k(settings.activation)) {
    const std::int64_t all = n_groups * n_tokens * per_token;
    if (settings.capacity == 0) return all;
    const std::int64_t per_layer =
        std::min(parallel::largest_part(settings.capacity, grid.size(parallel::kFeatureAxis)), shape.n_features);
    return std::min(all, n_tokens * shape.n_layers * per_layer);
  }
  return settings.activation == Activation::topk ? n_tokens * n_groups * std::min(budget, per_token)
                                                 : n_groups * std::min(budget, n_tokens * per_token);
}

std::int64_t owned_list_capacity(const ModelSettings& settings, const SelectionShape& shape,
                                 const parallel::GridShape& grid) {
  // The lists of a slice of the features over all tokens are those of a rank if all ranks were on the feature axis.
  const parallel::GridShape slices = parallel::data_by_feature(1, grid.ranks());
  if (activation_keeps_k(settings.activation)) return list_capacity(settings, shape, slices);
  ModelSettings unbounded = settings;
  unbounded.capacity = 0;
  return std::min(list_capacity(unbounded, shape, slices),
                  grid.size(parallel::kDataAxis) * list_capacity(settings, shape, grid));
}

// ---- Selector -------------------------------------------------------------------------------------------------------

void Selector::add_bytes(const SelectionSpec& spec, SelectionSizes& sizes) {
  PlacedArrays<ResultArrays>::add_bytes(spec, sizes);
}

Selector::ResultArrays::ResultArrays(const SelectionSpec& spec, const SelectionSizes& sizes, kernels::Workspace& device,
                                     kernels::Workspace& host) {
  const std::int64_t n_keys = spec.shape.n_layers * sizes.max_features;
  row_offsets = device.take<std::int64_t>(sizes.max_tokens + 1);
  key = device.take<std::uint32_t>(sizes.capacity);
  value = device.take<float>(sizes.capacity);
  hit_offsets = device.take<std::int64_t>(n_keys + 1);
  hit_token = device.take<std::uint32_t>(sizes.capacity);
  hit_position = device.take<std::uint32_t>(sizes.capacity);
  transpose_workspace = device.take<std::byte>(kernels::transpose_workspace(spec.backend, n_keys, sizes.capacity));
  n_entries = host.take<std::int64_t>(1);
}

Selector::Selector(const SelectionSpec& spec, const SelectionSizes& sizes, const parallel::Grid& grid,
                   const kernels::Execution& execution)
    : spec_(spec), sizes_(sizes), grid_(grid), execution_(execution), k_(spec.settings.k), result_(spec, sizes) {}

/// Forms the members of a batch that follow from its size, and sets the sizes of the result's arrays for this batch.
Selector::Batch Selector::start(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer) {
  const SelectionShape& shape = spec_.shape;
  if (n_tokens_total < 1 || n_tokens_total > shape.max_tokens)
    throw error(ExitCode::internal, "the selector was given a batch of {} tokens (it was made for at most {})",
                n_tokens_total, shape.max_tokens);
  WEFT_ASSERT(static_cast<std::int64_t>(bias_of_layer.size()) == shape.n_layers);
  ModelSettings settings = spec_.settings;
  settings.k = k_;
  const Batch batch{.n_tokens_total = n_tokens_total,
                    .n_tokens = grid_.part(parallel::kDataAxis, n_tokens_total).size(),
                    .features = grid_.part(parallel::kFeatureAxis, shape.n_features),
                    .budget = selection_budget(settings, shape.n_layers, n_tokens_total),
                    .bias = bias_of_layer};
  statistics_ = {};
  activations_ = {batch.n_tokens,        shape.n_layers,
                  batch.features.size(), {result_->row_offsets.data, batch.n_tokens + 1},
                  result_->key,          result_->value};
  hits_ = {{result_->hit_offsets.data, shape.n_layers * batch.features.size() + 1},
           result_->hit_token,
           result_->hit_position};
  return batch;
}

void Selector::select(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer,
                      const Producer& produce, std::span<const Array<const float>> cut_of_layer,
                      const kernels::EncoderOperands* operands) {
  WEFT_ASSERT(!spec_.shape.follows);
  WEFT_ASSERT(cut_of_layer.size() ==
              (spec_.settings.activation == Activation::jumprelu ? bias_of_layer.size() : std::size_t{0}));
  Batch batch = start(n_tokens_total, bias_of_layer);
  batch.cut = cut_of_layer;
  batch.produce = &produce;
  batch.operands = operands;
  select_batch(batch);
}

void Selector::follow(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer) {
  WEFT_ASSERT(spec_.shape.follows && spec_.settings.activation == Activation::topk);
  followed_ = start(n_tokens_total, bias_of_layer);
  begin();
}

void Selector::begin() { throw error(ExitCode::internal, "this selector does not follow another one"); }
void Selector::take(const kernels::Execution&, const TileRequest&, kernels::AnyMatrix) { begin(); }
void Selector::finish() { begin(); }

void Selector::transpose() { kernels::transpose(execution_, activations_, hits_, result_->transpose_workspace); }

const SelectionStatistics& Selector::statistics() {
  if (activations_.row_offsets.data == nullptr) return statistics_;  // nothing was selected yet
  if (activations_.n_tokens > 0) {
    device::copy(execution_, result_->n_entries.data, activations_.row_offsets.data + activations_.n_tokens,
                 sizeof(std::int64_t), device::Direction::to_host);
    kernels::fence(execution_);
    statistics_.entries = result_->n_entries[0];
  }
  read_statistics();
  return statistics_;
}

}  // namespace weft::transcoder

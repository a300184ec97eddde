// SPDX-License-Identifier: Apache-2.0
//
// The code that all drivers share.
#include "transcoder/selection/selection.hpp"

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"

namespace weft::transcoder {
using kernels::Array;

Selector::Selector(const SelectionSpec& spec, const SelectionBuffers& buffers, const parallel::Grid& grid,
                   const kernels::Execution& execution)
    : spec_(spec), buffers_(buffers), grid_(grid), execution_(execution), k_(spec.settings.k) {}

/// Forms the members of a batch that follow from its size, and sets the sizes of the result's arrays for this batch.
Selector::Batch Selector::start(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer) {
  if (n_tokens_total < 1 || n_tokens_total > spec_.max_tokens)
    throw error(ExitCode::internal, "the selector was given a batch of {} tokens (it was made for at most {})",
                n_tokens_total, spec_.max_tokens);
  WEFT_ASSERT(static_cast<std::int64_t>(bias_of_layer.size()) == spec_.n_layers);
  ModelSettings settings = spec_.settings;
  settings.k = k_;
  const Batch batch{.n_tokens_total = n_tokens_total,
                    .n_tokens = grid_.part(parallel::kDataAxis, n_tokens_total).size(),
                    .features = grid_.part(parallel::kFeatureAxis, spec_.n_features),
                    .budget = selection_budget(settings, spec_.n_layers, n_tokens_total),
                    .bias = bias_of_layer};
  statistics_ = {};
  activations_ = {batch.n_tokens,        spec_.n_layers,
                  batch.features.size(), {buffers_.row_offsets.data, batch.n_tokens + 1},
                  buffers_.key,          buffers_.value};
  hits_ = {{buffers_.hit_offsets.data, spec_.n_layers * batch.features.size() + 1},
           buffers_.hit_token,
           buffers_.hit_position};
  return batch;
}

void Selector::select(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer,
                      const Producer& produce, std::span<const Array<const float>> bounds_of_layer,
                      const kernels::EncoderOperands* operands) {
  WEFT_ASSERT(!spec_.follows);
  WEFT_ASSERT(bounds_of_layer.size() ==
              (activation_has_thresholds(spec_.settings.activation) ? bias_of_layer.size() : std::size_t{0}));
  Batch batch = start(n_tokens_total, bias_of_layer);
  batch.bounds = bounds_of_layer;
  batch.produce = &produce;
  batch.operands = operands;
  select_batch(batch);
}

void Selector::follow(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer) {
  WEFT_ASSERT(spec_.follows && spec_.settings.activation == Activation::topk);
  followed_ = start(n_tokens_total, bias_of_layer);
  begin();
}

void Selector::begin() { throw error(ExitCode::internal, "this selector does not follow another one"); }
void Selector::take(const kernels::Execution&, const kernels::TileRange&, kernels::AnyMatrix) { begin(); }
void Selector::finish() { begin(); }

void Selector::transpose() { kernels::transpose(execution_, activations_, hits_, buffers_.transpose_workspace); }

const kernels::SelectionStatistics& Selector::statistics() {
  if (activations_.row_offsets.data == nullptr) return statistics_;  // nothing was selected yet
  if (activations_.n_tokens > 0) {
    device::copy(execution_, buffers_.n_entries.data, activations_.row_offsets.data + activations_.n_tokens,
                 sizeof(std::int64_t), device::Direction::to_host);
    kernels::fence(execution_);
    statistics_.entries = buffers_.n_entries[0];
  }
  read_statistics();
  return statistics_;
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// The setup of a step: memory, parts, and the work between steps. step.cpp has the formulas.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "transcoder/parts/dead_features.hpp"
#include "transcoder/parts/error_weights.hpp"
#include "transcoder/parts/list.hpp"
#include "transcoder/step/step.hpp"

namespace weft::transcoder {

Step::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                       SparseDecoder& decoder, model::StepArena& arena)
    : loss(configuration, shape, grid, arena), bias(configuration, shape, arena) {
  const std::int64_t owned = largest_owned(shape, grid),
                     n_tokens = backward_batches(configuration.transcoder) * configuration.data.batch_tokens,
                     entries = configuration.transcoder.auxk > 0 ? DeadFeatures::capacity(configuration, shape, grid)
                                                                 : DataAxis::capacity(configuration, shape, grid);
  arena.purpose("backward pass");
  activation_gradient = arena.take<float>(entries);
  arena.communicator(grid.ranks(), largest_message(configuration, shape, grid.ranks()));
  encoder_workspace = arena.take<std::byte>(
      kernels::encode_backward_workspace(arena.backend(), shape.n_layers, owned, shape.d_model, entries));
  decoder.take_backward({configuration, shape, grid}, {n_tokens, entries}, arena);
  clipping =
      Clipping::Buffers(configuration.optimizer, shape.n_layers * owned, 1 + (shape.skip ? shape.width() : 0), arena);
  if (configuration.privacy.enabled) records = RecordClipping::Buffers(configuration, shape, grid, arena);
}

std::int64_t Step::largest_message(const Configuration& configuration, const Shape& shape, std::int64_t n_ranks) {
  return std::max(ErrorWeights::largest_message(configuration, shape, n_ranks),
                  RecordClipping::largest_message(configuration, shape, n_ranks));
}

Step::Step(const Configuration& configuration, const Model& model, const NormalisationOnDevice& normalisation,
           Forward& forward, const parallel::Grid& grid, const kernels::Execution& execution, run::Timers& timers,
           parallel::DeviceCommunicator& world, model::StepRunner& runner, model::StepArena& arena)
    : model_(model),
      forward_(forward),
      execution_(execution),
      timers_(timers),
      world_(world),
      runner_(runner),
      buffers_(configuration, model.shape(), grid.shape(), forward.decoder(), arena),
      data_axis_(configuration, model, grid, execution, arena),
      gradient_rows_(configuration, forward, data_axis_, grid, execution, arena),
      loss_(model, normalisation, forward, gradient_rows_, execution, timers, buffers_.loss),
      bias_(model, execution, buffers_.bias),
      clipping_(configuration.optimizer, model.shape().n_layers * model.owned().size(), world, execution,
                buffers_.clipping),
      records_(configuration.privacy.enabled
                   ? std::make_unique<RecordClipping>(configuration, model, forward, execution, timers, world,
                                                      buffers_.records)
                   : nullptr),
      selectors_{&forward.selection()},
      parts_(make_parts({.configuration = configuration,
                         .model = model,
                         .normalisation = normalisation,
                         .grid = grid,
                         .execution = execution_,
                         .timers = timers,
                         .arena = arena,
                         .forward = forward,
                         .data_axis = data_axis_,
                         .gradient_rows = gradient_rows_,
                         .clipping = clipping_,
                         .world = world,
                         .constants = runner.constants(),
                         .targets = buffers_.loss.targets,
                         .changes = changes_,
                         .selectors = selectors_,
                         .values = values_})) {
  data_axis_.ranks().mark(&forward.idle());
}

void Step::begin(std::int64_t step) {
  for (const auto& part : parts_) part->before_step(step);
}

void Step::end(std::int64_t step) {
  for (const auto& part : parts_) part->after_step(step);
  decoder_is_ahead_ = true;
}

void Step::complete_decoder() {
  if (!data_axis_.active() || !std::exchange(decoder_is_ahead_, false)) return;
  data_axis_.ranks().mark(nullptr);  // not part of a step
  data_axis_.gather_weights(model_.decoder());
  data_axis_.ranks().mark(&forward_.idle());
}

void Step::observe(const parallel::ExchangeObserver* observer) {
  forward_.axis().ranks.observe(observer);
  for (Selector* selector : selectors_) selector->observe(observer);
  data_axis_.ranks().observe(observer);
  data_axis_.overlapped().observe(observer);
  world_.observe(observer);
}

void Step::fence() {
  kernels::fence(forward_.axis().communication);
  kernels::fence(data_axis_.communication());
  kernels::fence(execution_);
}

void Step::fill(TrainingMetrics& metrics, const parallel::Communicator& ranks) const {
  std::vector<double> sums;
  for (const PartContext::Value& value : values_) sums.push_back(value.of_rank());
  if (!sums.empty()) ranks.sum(std::span<double>(sums));  // all ranks have the same parts
  for (std::size_t i = 0; i < sums.size(); ++i) metrics.*values_[i].metric = sums[i];
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/penalties.hpp"

#include <utility>

#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/decode/decode.hpp"

namespace weft::transcoder {

Penalties::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                            model::StepArena& arena) {
  const ModelSettings& settings = configuration.transcoder;
  const std::int64_t n_keys = shape.n_layers * largest_owned(shape, grid);
  arena.purpose("penalties");
  norm = arena.take<float>(n_keys);
  norm_gradient = arena.take<float>(n_keys);
  sparsity = arena.take<double>(n_keys);
  if (settings.preactivation_penalty > 0) {
    preactivation_norm_gradient = arena.take<float>(n_keys);
    preactivation = arena.take<float>(n_keys);
  }
  next_norm = arena.take<float>(n_keys);
  workspace = arena.take<double>(kernels::total_workspace(n_keys));
  sums = arena.take<double>(2);
}

Penalties::Penalties(PartContext& context)
    : settings_(context.configuration.transcoder),
      steps_(context.configuration.run.steps),
      of_activations_(settings_.sparsity > 0),
      of_preactivations_(settings_.preactivation_penalty > 0),
      model_(context.model),
      forward_(context.forward),
      execution_(context.execution),
      constants_(context.constants),
      changes_(context.changes),
      buffers_(context.configuration, model_.shape(), context.grid.shape(), context.arena) {
  context.penalties = this;
  device::zero(execution_, buffers_.sums);
  const auto value = [this](std::int64_t i) {
    return [this, i] { return device::read(execution_, buffers_.sums.data + i); };
  };
  context.values.push_back({&TrainingMetrics::sparsity_penalty, value(0)});
  context.values.push_back({&TrainingMetrics::preactivation_penalty, value(1)});
}

void Penalties::before_step(std::int64_t) {
  if (n_keys() == 0 || std::exchange(norms_of_changes_, changes_) == changes_) return;
  kernels::decoder_norms(execution_, model_.owned_decoder(), {buffers_.next_norm.data, n_keys()});
}

kernels::SparsityPenalty Penalties::sparsity() const {
  kernels::SparsityPenalty penalty{.form = settings_.sparsity_form,
                                   .scale = static_cast<float>(settings_.sparsity_scale),
                                   .coefficient = {},
                                   .step = constants_};
  if (!of_activations_) return penalty;
  const double steps = static_cast<double>(steps_);
  penalty.coefficient = {static_cast<float>(settings_.sparsity / divisor(settings_.sparsity_reduction)),
                         settings_.sparsity_begin * steps, settings_.sparsity_end * steps};
  return penalty;
}

kernels::PreactivationPenalty Penalties::preactivation() const {
  return {settings_.preactivation_form,
          static_cast<float>(settings_.preactivation_penalty / divisor(settings_.preactivation_reduction))};
}

double Penalties::divisor(Reduction reduction) const {
  return transcoder::divisor(reduction, forward_.layout().total, model_.shape().n_layers, model_.shape().n_features);
}

void Penalties::before_decoder(BackwardPass& pass) {
  pass.row_factors = buffers_.norm_gradient;
  pass.new_norms = buffers_.next_norm;
  if (!pass.first || n_keys() == 0) return;
  device::copy(execution_, buffers_.norm.data, buffers_.next_norm.data,
               n_keys() * static_cast<std::int64_t>(sizeof(float)), device::Direction::on_device);
  forward_.decoder().to_feature_norms({buffers_.norm.data, n_keys()});
  if (of_activations_) {
    kernels::sparsity_sums(execution_, sparsity(), pass.selected.activations, pass.selected.hits,
                           {buffers_.norm.data, n_keys()}, buffers_.norm_gradient, buffers_.sparsity);
  } else {
    device::zero(execution_, buffers_.norm_gradient);
    device::zero(execution_, buffers_.sparsity);
  }
  if (!of_preactivations_) complete();
}

void Penalties::complete() {
  if (n_keys() == 0) return;
  kernels::decoder_row_factors(execution_, {buffers_.norm_gradient.data, n_keys()},
                               buffers_.preactivation_norm_gradient, buffers_.norm);
  forward_.decoder().to_row_factors({buffers_.norm_gradient.data, n_keys()});
  kernels::total(execution_, kernels::Array<const double>{buffers_.sparsity.data, n_keys()}, buffers_.workspace,
                 buffers_.sums.data);
  if (of_preactivations_)
    kernels::total(execution_, kernels::Array<const float>{buffers_.preactivation.data, n_keys()}, buffers_.workspace,
                   buffers_.sums.data + 1);
}

void Penalties::after_decoder(BackwardPass& pass) {
  if (of_activations_ && n_keys() > 0)
    kernels::add_sparsity_gradient(execution_, sparsity(), pass.selected.activations, buffers_.norm, pass.gradient);
}

}  // namespace weft::transcoder

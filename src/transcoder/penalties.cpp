// SPDX-License-Identifier: Apache-2.0
#include "transcoder/penalties.hpp"

#include <utility>

#include "device/memory.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/decode/by_target.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "transcoder/decoding.hpp"

namespace weft::transcoder {

Penalties::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                            training::StepArena& arena) {
  const ModelSettings& settings = configuration.transcoder;
  if (!wanted(configuration)) return;
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

Penalties::Penalties(const Configuration& configuration, const Model& model, const parallel::GridShape& grid,
                     const kernels::Execution& execution, const kernels::AdamStep* step, training::StepArena& arena)
    : settings_(configuration.transcoder),
      steps_(configuration.run.steps),
      of_activations_(settings_.sparsity > 0),
      of_preactivations_(settings_.preactivation_penalty > 0),
      model_(model),
      execution_(execution),
      step_(step),
      buffers_(configuration, model.shape(), grid, arena) {
  if (active()) device::zero(execution, buffers_.sums);
}

bool Penalties::wanted(const Configuration& configuration) {
  return configuration.transcoder.sparsity > 0 || configuration.transcoder.preactivation_penalty > 0;
}

void Penalties::prepare() {
  if (!active() || n_keys() == 0 || std::exchange(norms_known_, true)) return;
  kernels::decoder_norms(execution_, model_.owned_decoder(), {buffers_.next_norm.data, n_keys()});
}

kernels::SparsityPenalty Penalties::sparsity() const {
  kernels::SparsityPenalty penalty{.form = settings_.sparsity_form,
                                   .scale = static_cast<float>(settings_.sparsity_scale),
                                   .coefficient = {},
                                   .step = step_};
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
  return transcoder::divisor(reduction, n_tokens_, model_.shape().n_layers, model_.shape().n_features);
}

void Penalties::form(const kernels::SparseActivations& activations, const kernels::FeatureHits& hits,
                     std::int64_t n_tokens) {
  n_tokens_ = n_tokens;
  if (n_keys() == 0) return;
  device::copy(execution_, buffers_.norm.data, buffers_.next_norm.data,
               n_keys() * static_cast<std::int64_t>(sizeof(float)), device::Direction::on_device);
  if (model_.shape().decoder == Decoder::tied_target)
    kernels::norms_of_features(execution_, model_.shape().n_layers, {buffers_.norm.data, n_keys()});
  if (of_activations_) {
    kernels::sparsity_sums(execution_, sparsity(), activations, hits, {buffers_.norm.data, n_keys()},
                           buffers_.norm_gradient, buffers_.sparsity);
  } else {
    device::zero(execution_, buffers_.norm_gradient);
    device::zero(execution_, buffers_.sparsity);
  }
}

void Penalties::complete() {
  if (n_keys() == 0) return;
  kernels::decoder_row_factors(execution_, {buffers_.norm_gradient.data, n_keys()},
                               buffers_.preactivation_norm_gradient, buffers_.norm);
  if (model_.shape().decoder == Decoder::tied_target)
    kernels::factors_of_rows(execution_, model_.shape().n_layers, {buffers_.norm_gradient.data, n_keys()});
  kernels::total(execution_, kernels::Array<const double>{buffers_.sparsity.data, n_keys()}, buffers_.workspace,
                 buffers_.sums.data);
  if (of_preactivations_)
    kernels::total(execution_, kernels::Array<const float>{buffers_.preactivation.data, n_keys()}, buffers_.workspace,
                   buffers_.sums.data + 1);
}

void Penalties::add_to(kernels::Array<float> activation_gradient, const kernels::SparseActivations& activations) {
  if (of_activations_ && n_keys() > 0)
    kernels::add_sparsity_gradient(execution_, sparsity(), activations, buffers_.norm, activation_gradient);
}

std::pair<double, double> Penalties::values() const {
  return active()
             ? std::pair{device::read(execution_, buffers_.sums.data), device::read(execution_, buffers_.sums.data + 1)}
             : std::pair{0.0, 0.0};
}

}  // namespace weft::transcoder

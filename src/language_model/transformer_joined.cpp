// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of few rows, such as a step of generation: products apply the norm of the rows that they read and
// add what they form to the residual stream (kernels/language/linear/linear.hpp).
#include <algorithm>

#include "language_model/transformer.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;

Transformer::JoinedBuffers::JoinedBuffers(const Architecture& architecture, kernels::Scalar type, std::int64_t rows,
                                          training::StepArena& arena) {
  const ModelSettings& model = architecture.model;
  if (arena.backend() != kernels::Backend::cuda || type != kernels::Scalar::bf16 || rows > kernels::kMostFewRows ||
      !model.normalises_inputs() || model.normalises_outputs() || architecture.lora.rank > 0)
    return;
  arena.purpose("products joined with norms");
  const auto take = [&](std::int64_t outputs) {
    const std::int64_t inputs = model.d_model;
    return Product{{arena.take<kernels::bf16>(outputs * inputs).data, outputs, inputs, inputs},
                   arena.take<float>(outputs),
                   arena.take<float>(outputs)};
  };
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    projections.push_back(take(architecture.projection_width()));
    ups.push_back(take(architecture.hidden_width()));
  }
}

std::vector<Transformer::JoinedBlock> Transformer::join_norms(const JoinedBuffers& buffers) {
  std::vector<JoinedBlock> joined;
  for (std::size_t layer = 0; layer < buffers.ups.size(); ++layer) {
    const Block& block = model_.blocks()[layer];
    const auto join = [&](const Linear& linear, const NormLayer& norm, const JoinedBuffers::Product& to) {
      return kernels::join_norm(execution_, weights_of(linear), norm.values, to.weights, to.bias, to.sums);
    };
    joined.push_back({join(block.projection, *block.attention_norm, buffers.projections[layer]),
                      join(block.up, *block.mlp_norm, buffers.ups[layer])});
  }
  return joined;
}

/// Of models that normalise the inputs of their sublayers alone, with nothing between a product and the residual
/// stream, where no backward pass follows: there is none after a forward pass whose attention reads a cache.
bool Transformer::joins_norms(const Tokens& tokens, const kernels::AdamStep* step) const {
  if (joined_.empty() || (settings_.gradients && !attention_hook_) || tap_ || tensor_ != nullptr || drops(step) ||
      !coded_weights_.empty() || !settings().normalises_inputs() || settings().normalises_outputs())
    return false;
  return std::all_of(model_.blocks().begin(), model_.blocks().end(), [&](const Block& block) {
    const Linear* const products[] = {&block.projection, &block.attention_output, &block.up, &block.down};
    return std::all_of(std::begin(products), std::end(products), [&](const Linear* product) {
      return !adapts(*product) && kernels::joins_norms(execution_, weights_of(*product), tokens.rows(), settings_.type);
    });
  });
}

void Transformer::forward_joined(const Tokens& tokens) {
  const std::int64_t n = tokens.rows();
  const kernels::Array<kernels::Moments> moments = buffers_.moments;
  const bool scales = settings().embedding_scale != 1;
  await_weights(kNoParameter);
  embed(tokens, nullptr, scales ? kernels::Array<kernels::Moments>{} : moments);
  timers_.phase("products");
  for (std::size_t layer = 0; layer < buffers_.blocks.size(); ++layer) {
    const Block& parameters = model_.blocks()[layer];
    const Activations& block = buffers_.blocks[layer];
    const bool last = layer + 1 == buffers_.blocks.size();
    const AnyMatrix residual = block.residual.rows_from(0, n), middle = block.middle.rows_from(0, n),
                    projected = block.projected.rows_from(0, n), hidden = block.hidden.rows_from(0, n),
                    activated = block.activated.rows_from(0, n),
                    next = (last ? buffers_.final_residual : buffers_.blocks[layer + 1].residual).rows_from(0, n);
    if (layer == 0 && scales) {
      enter(layer, tokens);  // no kernel has left moments of these rows
      multiply(parameters.projection, block.attention_input.rows_from(0, n), projected);
    } else {
      kernels::linear_of_norm(execution_, joined_[layer].projection, moments, residual, projected, {});
    }
    mix(layer, tokens, nullptr);
    timers_.phase("products");
    const kernels::CachedAhead ahead =
        last || !ahead_hook_ ? kernels::CachedAhead{} : ahead_hook_(static_cast<std::int64_t>(layer) + 1);
    constexpr std::int32_t kParts = 3;  // products until the next layer
    kernels::linear_added(execution_, weights_of(parameters.attention_output), block.mixed.rows_from(0, n), residual,
                          middle, moments, ahead.part(0, kParts));
    const kernels::JoinedNorm& up = joined_[layer].up;
    if (kernels::is_gated(settings().mlp)) {
      kernels::linear_of_norm(execution_, up, moments, middle, hidden, {}, ahead.part(1, kParts));
      timers_.phase("activation");
      kernels::mlp_activation(execution_, settings().mlp, hidden, activated);
      timers_.phase("products");
    } else {
      kernels::linear_of_norm(execution_, up, moments, middle, activated, settings().mlp, ahead.part(1, kParts));
    }
    kernels::linear_added(execution_, weights_of(parameters.down), activated, middle, next, moments,
                          ahead.part(2, kParts));
  }
  timers_.phase("norms");
  normalise(model_.final_norm(), buffers_.final_residual.rows_from(0, n), {}, {}, buffers_.final_output.rows_from(0, n),
            buffers_.final_norm);
}

}  // namespace weft::language_model

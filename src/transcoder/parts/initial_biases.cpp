// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/initial_biases.hpp"

#include <algorithm>

#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/encode/quantile_bias.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLargestProduct = 64 << 20;  // bytes

}  // namespace

InitialBias::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                              model::StepArena& arena) {
  const std::int64_t tokens = configuration.data.batch_tokens,
                     features = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  tile_features = std::clamp<std::int64_t>(kLargestProduct / (4 * tokens), 1, features);
  arena.purpose("initial biases");
  product = arena.take<float>(tokens * tile_features);
  workspace = arena.take<std::byte>(kernels::encode_workspace(arena.backend(), tokens, tile_features, shape.d_model,
                                                              scalar_of(configuration.precision),
                                                              configuration.optimizer.state, kernels::Scalar::fp32));
}

InitialBias::InitialBias(PartContext& context)
    : settings_(context.configuration.transcoder),
      model_(context.model),
      forward_(context.forward),
      data_axis_(context.data_axis),
      timers_(context.timers),
      execution_(context.execution),
      buffers_(context.configuration, model_.shape(), context.grid.shape(), context.arena) {}

void InitialBias::before_step(std::int64_t step) {
  if (step != 1) return;
  timers_.phase("initial biases");
  forward_.gather_inputs();
  data_axis_.gather_rows(forward_.all_inputs());
  fit(forward_.all_inputs());
}

void InitialBias::fit(kernels::AnyMatrix x) {
  const Shape& shape = model_.shape();
  const std::int64_t n = model_.n_local(), d = shape.d_model;
  const double part =
      std::min(0.5, static_cast<double>(settings_.initially_active) / static_cast<double>(shape.n_features));
  const auto active = static_cast<std::int64_t>(part * static_cast<double>(x.rows));
  const float cut = shape.threshold ? static_cast<float>(*shape.threshold) : 0.0f;
  for (std::int64_t s = 0; s < shape.n_layers; ++s)
    for (std::int64_t begin = 0; begin < n; begin += buffers_.tile_features) {
      const std::int64_t count = std::min(buffers_.tile_features, n - begin);
      const auto layer = static_cast<std::size_t>(s);
      kernels::encode_tile(execution_, x.columns_from(s * d, d), model_.encoder()[layer], begin,
                           {buffers_.product.data, kernels::Scalar::fp32, x.rows, count, count}, buffers_.workspace);
      kernels::bias_of_quantile(execution_, {buffers_.product.data, x.rows, count, count}, active, cut,
                                {model_.encoder_bias()[layer].weight.data + begin, count});
    }
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward/feature_statistics.hpp"

#include <algorithm>

#include "kernels/gemm/gemm.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "kernels/transcoder/select/ranking.hpp"
#include "transcoder/axes/feature_axis.hpp"

namespace weft::transcoder {
namespace {

using kernels::AnyMatrix;
using kernels::Form;
using kernels::Scalar;

constexpr std::int64_t kLargestTile = 64 << 20;  // bytes

}  // namespace

FeatureStatistics::Buffers::Buffers(const Configuration& configuration, const Shape& shape,
                                    const parallel::GridShape& grid, model::StepArena& arena) {
  const std::int64_t d = shape.d_model,
                     features = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  const Scalar scalar = scalar_of(configuration.precision);
  tile_features = std::clamp<std::int64_t>(kLargestTile / (4 * d), 1, features);
  sums = arena.take<float>(d);
  products = arena.take<float>(d * d);
  tile = arena.take<float>(tile_features * d);
  mean = arena.take<float>(shape.n_layers * features);
  spread = arena.take<float>(shape.n_layers * features);
  const Scalar weights =
      kernels::product_type(configuration.optimizer.state, arena.backend() == kernels::Backend::cuda);
  workspace = arena.take<std::byte>(
      std::max(kernels::gemm_workspace(scalar, scalar, Scalar::fp32, d, d, configuration.data.batch_tokens),
               kernels::gemm_workspace(weights, Scalar::fp32, Scalar::fp32, tile_features, d, d)));
}

FeatureStatistics::FeatureStatistics(const Model& model, const kernels::Execution& execution, const Buffers& buffers)
    : model_(model), execution_(execution), buffers_(buffers) {}

void FeatureStatistics::form(AnyMatrix x) {
  const std::int64_t d = model_.shape().d_model, n = model_.n_local();
  const AnyMatrix products{buffers_.products.data, Scalar::fp32, d, d, d};
  for (std::int64_t s = 0; s < model_.shape().n_layers; ++s) {
    const auto layer = static_cast<std::size_t>(s);
    const AnyMatrix inputs = x.columns_from(s * d, d);
    kernels::column_sums(execution_, inputs, buffers_.sums);
    kernels::gemm(execution_, 1.0f, inputs, Form::transposed, inputs, Form::plain, 0.0f, products, buffers_.workspace);
    kernels::centre_products(execution_, buffers_.sums, x.rows, {buffers_.products.data, d, d, d});
    for (std::int64_t begin = 0; begin < n; begin += buffers_.tile_features) {
      const std::int64_t count = std::min(buffers_.tile_features, n - begin), at = s * n + begin;
      const AnyMatrix weights = kernels::product_weights(model_.encoder()[layer]).rows_from(begin, count);
      kernels::gemm(execution_, 1.0f, weights, Form::plain, products, Form::plain, 0.0f,
                    {buffers_.tile.data, Scalar::fp32, count, d, d}, buffers_.workspace);
      kernels::feature_statistics(execution_, weights, {model_.encoder_bias()[layer].weight.data + begin, count},
                                  {buffers_.tile.data, count, d, d}, buffers_.sums, x.rows,
                                  {buffers_.mean.data + at, count}, {buffers_.spread.data + at, count});
    }
  }
}

}  // namespace weft::transcoder

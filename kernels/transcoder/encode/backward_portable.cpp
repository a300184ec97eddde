// SPDX-License-Identifier: Apache-2.0
//
// The sparse backward pass of the encoder: only features that fired contribute, every row is updated.
#include "kernels/optimize/adam_row.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"

namespace weft::kernels::portable {
namespace {

struct BackwardHits {
  const std::int64_t* offsets;
  const std::uint32_t* token;
  const std::uint32_t* position;
  const float* preactivation_gradient;  // by CSR position
};

// gradient[c] = sum over the feature's hits of dz * x[token, column + c], hits in token order.
KOKKOS_FORCEINLINE_FUNCTION void gather_chunk(const Team& team, const BackwardHits& hits, std::int64_t key,
                                              const AnyMatrix& x, std::int64_t column, int count, float* gradient,
                                              float* row_buffer) {
  const std::int64_t begin = hits.offsets[key], end = hits.offsets[key + 1];
  if (begin == end) for_columns(team, count, [=](int c) { gradient[c] = 0.0f; });
  for (std::int64_t hit = begin; hit < end; ++hit) {
    const float dz = hits.preactivation_gradient[hits.position[hit]];
    if (hit + 1 < end) prefetch_chunk(x, hits.token[hit + 1], column, count);
    const float* input = row_chunk(team, x, hits.token[hit], column, count, row_buffer);
    if (hit == begin)
      for_columns(team, count, [=](int c) { gradient[c] = dz * input[c]; });
    else
      for_columns(team, count, [=](int c) { gradient[c] += dz * input[c]; });
  }
}

KOKKOS_FORCEINLINE_FUNCTION float bias_gradient(const BackwardHits& hits, std::int64_t key) {
  float sum = 0.0f;
  for (std::int64_t hit = hits.offsets[key]; hit < hits.offsets[key + 1]; ++hit)
    sum += hits.preactivation_gradient[hits.position[hit]];
  return sum;
}

// Processes one layer. If `step` is null only the norms are formed: `parameters` then gives the shape alone, so the
// epilogue must not read weights.
template <class Epilogue, class BiasNoise>
void backward(const Execution& execution, const BackwardHits& hits, const AnyMatrix& x, std::int64_t first_key,
              std::int64_t first_column, const ParameterRows& parameters, const ParameterVector& bias,
              const Epilogue& epilogue, const BiasNoise& bias_noise, const AdamStep* step, double* squared_norm) {
  for_teams(
      execution, "encode_backward", parameters.rows, sizeof(RowScratch), KOKKOS_LAMBDA(const Team& team) {
        if (step != nullptr && step->withheld != 0) return;
        const std::int64_t row = team.league_rank();
        const std::int64_t key = first_key + row;
        const bool has_hits = hits.offsets[key] < hits.offsets[key + 1];
        const double norm =
            walk_row(team, parameters, row, key, has_hits, false, squared_norm != nullptr, epilogue, step,
                     [&](std::int64_t column, int count, const float*, RowScratch& buffer) {
                       gather_chunk(team, hits, key, x, first_column + column, count, buffer.gradient, buffer.row);
                     });
        once(team, [&] {
          const float gradient =
              bias_noise.add_to(bias_gradient(hits, key), static_cast<std::uint64_t>(parameters.first_row + row), row);
          const double g = (step != nullptr ? step->gradient_scale : 1.0f) * gradient;
          if (squared_norm != nullptr) squared_norm[key] = norm + g * g;
          if (step != nullptr) adam_bias(bias, row, gradient, *step);
        });
      });
}

BackwardHits hits_of(const FeatureHits& hits, Array<const float> preactivation_gradient) {
  return {hits.offsets.data, hits.token.data, hits.position.data, preactivation_gradient.data};
}

}  // namespace

std::int64_t encode_backward_workspace(Backend, std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
  return 0;  // teams use scratch memory only
}

void encode_backward_update(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                            AnyMatrix x, Array<const float> preactivation_gradient,
                            std::span<const ParameterRows> encoder, std::span<const ParameterVector> bias,
                            const AdamStep* step, Array<double> squared_norm, Array<std::byte>) {
  for (std::size_t s = 0; s < encoder.size(); ++s) {
    require_portable_storage(encoder[s]);
    const std::int64_t layer = static_cast<std::int64_t>(s);
    backward(execution, hits_of(hits, preactivation_gradient), x, layer * activations.n_features,
             layer * encoder[s].columns, encoder[s], bias[s], RowEpilogue<>{}, NoRowNoise{}, step, squared_norm.data);
  }
}

void encode_backward_norm(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                          AnyMatrix x, Array<const float> preactivation_gradient, Array<double> squared_norm,
                          Array<std::byte>) {
  const std::int64_t d_model = x.columns / activations.n_layers;
  ParameterRows shape;
  shape.rows = activations.n_features;
  shape.columns = shape.segment = d_model;
  for (std::int64_t layer = 0; layer < activations.n_layers; ++layer)
    backward(execution, hits_of(hits, preactivation_gradient), x, layer * activations.n_features, layer * d_model,
             shape, {}, RowEpilogue<>{}, NoRowNoise{}, nullptr, squared_norm.data);
}

void encode_backward_noisy(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                           AnyMatrix x, Array<const float> preactivation_gradient,
                           std::span<const ParameterRows> encoder, std::span<const ParameterVector> bias,
                           const AdamStep* step, Array<double> squared_norm, Array<std::byte>, const RowNoise& noise,
                           const RowNoise& bias_noise) {
  for (std::size_t s = 0; s < encoder.size(); ++s) {
    require_portable_storage(encoder[s]);
    const std::int64_t layer = static_cast<std::int64_t>(s);
    backward(execution, hits_of(hits, preactivation_gradient), x, layer * activations.n_features,
             layer * encoder[s].columns, encoder[s], bias[s], NoisyEpilogue{.noise = noise.of_layer(layer)},
             bias_noise.of_layer(layer), step, squared_norm.data);
  }
}

}  // namespace weft::kernels::portable

// SPDX-License-Identifier: Apache-2.0
#include "kernels/constants.hpp"
#include "kernels/optimize/adam_row.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/decode/decode.hpp"

namespace weft::kernels::portable {

namespace {

// Columns of y that one team sums at a time. On the host as many as the first two cache levels hold, so that a strip is
// read in one piece; on a GPU fewer, which gives more teams and needs less shared memory.
#ifdef KOKKOS_ENABLE_CUDA
constexpr int kForwardColumns = 1024;
#else
constexpr int kForwardColumns = 4096;
#endif

struct DecoderWeights {
  const void* layer[kMostLayers];
  std::int64_t n_layers, d_model;
  bool cross_layer;
};

// to[c] += sum over i of activation[i] * strip[i][c], in the order of the entries.
template <int n_entries, class Weight>
KOKKOS_FORCEINLINE_FUNCTION void add_strips(const Team& team, const float* activation, const Weight* const* strip,
                                            float* to, int count) {
  float a[n_entries];
  const Weight* w[n_entries];
  for (int i = 0; i < n_entries; ++i) {
    a[i] = activation[i];
    w[i] = strip[i];
  }
  for_columns(team, count, [&](int c) {
    float sum = to[c];
    for (int i = 0; i < n_entries; ++i) sum += a[i] * static_cast<float>(w[i][c]);
    to[c] = sum;
  });
}

template <class Weight>
void forward(const Execution& execution, const SparseActivations& activations, std::int64_t token_begin,
             std::int64_t token_count, const DecoderWeights& weights, std::int64_t target_begin, const AnyMatrix& y) {
  const std::int64_t d_model = weights.d_model, first_column = target_begin * d_model;
  const std::int64_t n_features = activations.n_features;
  const std::int64_t n_blocks = (y.columns + kForwardColumns - 1) / kForwardColumns;
  const std::int64_t block_columns = (y.columns + n_blocks - 1) / n_blocks;
  const std::int64_t* offsets = activations.row_offsets.data;
  const std::uint32_t* keys = activations.key.data;
  const float* values = activations.value.data;
  for_teams(
      execution, "decode_forward", token_count * n_blocks, kForwardColumns * sizeof(float),
      KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank() / n_blocks;
        const std::int64_t column = team.league_rank() % n_blocks * block_columns;  // column of y
        const std::int64_t begin = first_column + column;                           // column among those of all targets
        const int count = smaller(block_columns, y.columns - column);
        float* sum = scratch<float[kForwardColumns]>(team);
        for_columns(team, count, [&](int c) { sum[c] = 0.0f; });
        const std::int64_t end = offsets[token_begin + row + 1];
        std::int64_t entry = offsets[token_begin + row];
        while (entry < end) {
          // Up to four entries of one source layer share a pass over the sums: the same order of additions, fewer
          // reads and writes, and four streams from memory at once.
          constexpr int kTogether = 4;
          const std::int64_t source = keys[entry] / n_features;
          const std::int64_t source_begin = source * d_model;
          const std::int64_t source_columns = (weights.cross_layer ? weights.n_layers - source : 1) * d_model;
          if (source_begin >= begin + count) break;  // sources ascend: no later one reaches this block
          // Range of columns of the block that this source writes to.
          const std::int64_t first = begin > source_begin ? begin : source_begin;
          const int width = smaller(begin + count - first, source_begin + source_columns - first);
          if (width <= 0) {
            ++entry;
            continue;
          }
          const Weight* layer = static_cast<const Weight*>(weights.layer[source]);
          float activation[kTogether];
          const Weight* strip[kTogether];
          int together = 0;
          for (; together < kTogether && entry < end; ++together, ++entry) {
            const std::int64_t feature = static_cast<std::int64_t>(keys[entry]) - source * n_features;
            if (feature >= n_features) break;
            activation[together] = values[entry];
            strip[together] = layer + feature * source_columns + (first - source_begin);
          }
          float* to = sum + (first - begin);
          if (together == kTogether) {
            add_strips<kTogether>(team, activation, strip, to, width);
          } else {
            for (int i = 0; i < together; ++i) add_strips<1>(team, activation + i, strip + i, to, width);
          }
        }
        store_chunk(team, y, row, column, count, [&](int c) { return sum[c]; });
      });
}

}  // namespace

void decode_forward(const Execution& execution, const SparseActivations& activations, std::int64_t token_begin,
                    std::int64_t token_count, std::span<const ParameterRows> decoder, std::int64_t target_begin,
                    AnyMatrix y) {
  require_layers("decode_forward", decoder.size());
  DecoderWeights weights{{}, std::ssize(decoder), decoder[0].segment, is_cross_layer(decoder)};
  for (std::size_t s = 0; s < decoder.size(); ++s) {
    require_portable_storage(decoder[s]);
    weights.layer[s] = decoder[s].weight;
  }
  if (decoder[0].storage == StorageType::fp32)
    forward<float>(execution, activations, token_begin, token_count, weights, target_begin, y);
  else
    forward<bf16>(execution, activations, token_begin, token_count, weights, target_begin, y);
}

namespace {

// Arrays of the hits as plain pointers, captured by value.
struct Hits {
  const std::int64_t* offsets;
  const std::uint32_t* token;
  const std::uint32_t* position;
  const float* value;  // by CSR position
};

Hits hits_of(const SparseActivations& activations, const FeatureHits& hits) {
  return {hits.offsets.data, hits.token.data, hits.position.data, activations.value.data};
}

// gradient[c] = sum over the feature's hits of a * g[token, column + c], hits in token order.
// With `activation_gradient`: da of each hit gains <weight, g> over the chunk; the first chunk (`fresh`) sets it.
KOKKOS_FORCEINLINE_FUNCTION void gather_chunk(const Team& team, const Hits& hits, std::int64_t key,
                                              const AnyMatrix& gradient_rows, std::int64_t column, int count,
                                              const float* weight, bool fresh, float* activation_gradient,
                                              float* gradient, float* row_buffer) {
  const std::int64_t begin = hits.offsets[key], end = hits.offsets[key + 1];
  if (begin == end) for_columns(team, count, [=](int c) { gradient[c] = 0.0f; });
  for (std::int64_t hit = begin; hit < end; ++hit) {
    const std::int64_t position = hits.position[hit];
    const float activation = hits.value[position];
    if (hit + 1 < end) prefetch_chunk(gradient_rows, hits.token[hit + 1], column, count);
    const float* g = row_chunk(team, gradient_rows, hits.token[hit], column, count, row_buffer);
    if (hit == begin)
      for_columns(team, count, [=](int c) { gradient[c] = activation * g[c]; });
    else
      for_columns(team, count, [=](int c) { gradient[c] += activation * g[c]; });
    if (activation_gradient == nullptr) continue;
    const float dot = sum_columns<float>(team, count, [=](int c) { return weight[c] * g[c]; });
    once(team, [&] { activation_gradient[position] = fresh ? dot : activation_gradient[position] + dot; });
  }
}

// Processes one layer: da, norms and, if `step` is set, the update.
template <class Epilogue>
void backward(const Execution& execution, const SparseActivations& activations, const FeatureHits& feature_hits,
              const AnyMatrix& gradient_rows, std::int64_t layer, const ParameterRows& parameters,
              const Epilogue& epilogue, const AdamStep* step, float* activation_gradient, double* squared_norm) {
  require_portable_storage(parameters);
  const Hits hits = hits_of(activations, feature_hits);
  const std::int64_t first_key = layer * activations.n_features, first_column = layer * parameters.segment;
  for_teams(
      execution, "decode_backward", parameters.rows, sizeof(RowScratch), KOKKOS_LAMBDA(const Team& team) {
        if (step != nullptr && step->withheld != 0) return;
        const std::int64_t row = team.league_rank();
        const std::int64_t key = first_key + row;
        const bool has_hits = hits.offsets[key] < hits.offsets[key + 1];
        const double norm =
            walk_row(team, parameters, row, key, has_hits, has_hits, squared_norm != nullptr, epilogue, step,
                     [&](std::int64_t column, int count, const float* weight, RowScratch& buffer) {
                       gather_chunk(team, hits, key, gradient_rows, first_column + column, count, weight, column == 0,
                                    activation_gradient, buffer.gradient, buffer.row);
                     });
        if (squared_norm != nullptr) once(team, [&] { squared_norm[key] = norm; });
      });
}

}  // namespace

void decoder_norms(const Execution& execution, std::span<const ParameterRows> decoder, Array<float> norm) {
  float* out = norm.data;
  for (const ParameterRows& parameters : decoder) {
    require_portable_storage(parameters);
    for_teams(
        execution, "decoder_norms", parameters.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
          const std::int64_t row = team.league_rank();
          auto& buffer = scratch<float[kChunkColumns]>(team);
          double sum = 0.0;
          for_chunks(parameters.columns, parameters.columns, [&](std::int64_t column, int count) {
            const float* weight = weight_chunk(team, parameters, row, column, count, buffer);
            sum += sum_columns<double>(team, count, [&](int c) { return static_cast<double>(weight[c]) * weight[c]; });
          });
          once(team, [&] { out[row] = static_cast<float>(sqrt(sum)); });
        });
    out += parameters.rows;
  }
}

std::int64_t decode_backward_workspace(Backend, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool) {
  return 0;  // teams use scratch memory only
}

namespace {

// Processes all layers.
template <class Epilogue>
void backward_layers(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                     const AnyMatrix& gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                     float* activation_gradient, double* squared_norm, const LateRows& late, const Epilogue& epilogue) {
  if (late.wait) late.wait();
  for (std::int64_t s = 0; s < std::ssize(decoder); ++s) {
    Epilogue of_layer = epilogue;
    of_layer.noise = epilogue.noise.of_layer(s);
    backward(execution, activations, hits, gradient_rows, s, decoder[static_cast<std::size_t>(s)], of_layer, step,
             activation_gradient, squared_norm);
  }
}

// The same with the epilogue that the factors require.
void backward_layers(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                     const AnyMatrix& gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                     float* activation_gradient, double* squared_norm, const LateRows& late, const float* factors) {
  const auto layers = [&](const auto& epilogue) {
    backward_layers(execution, activations, hits, gradient_rows, decoder, step, activation_gradient, squared_norm, late,
                    epilogue);
  };
  if (factors != nullptr)
    layers(RowEpilogue<RowFactors>{.extra = {factors}});
  else
    layers(RowEpilogue<>{});
}

}  // namespace

void decode_backward_update(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                            AnyMatrix gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                            Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte>,
                            const LateRows& late, Array<const float> factors, Array<float> new_norms) {
  backward_layers(execution, activations, hits, gradient_rows, decoder, step, activation_gradient.data,
                  squared_norm.data, late, factors.data);
  if (new_norms.data != nullptr) portable::decoder_norms(execution, decoder, new_norms);
}

void decode_backward_norm(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                          AnyMatrix gradient_rows, std::span<const ParameterRows> decoder,
                          Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte>,
                          const LateRows& late, Array<const float> factors) {
  backward_layers(execution, activations, hits, gradient_rows, decoder, nullptr, activation_gradient.data,
                  squared_norm.data, late, factors.data);
}

void decode_backward_noisy(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                           AnyMatrix gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                           Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte>,
                           const LateRows& late, const RowNoise& noise) {
  backward_layers(execution, activations, hits, gradient_rows, decoder, step, activation_gradient.data,
                  squared_norm.data, late, NoisyEpilogue{.noise = noise});
}

}  // namespace weft::kernels::portable

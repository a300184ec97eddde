// SPDX-License-Identifier: Apache-2.0
//
// The decoder's backward pass. Widths that are multiples of 8 with bf16 gradient rows use the stream
// (feature_stream_cuda.cuh), all others walk feature by feature (feature_rows_cuda.cuh).
#include <algorithm>

#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/sparse/feature_rows_cuda.cuh"
#include "kernels/transcoder/sparse/feature_stream_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

/// Adds the dot products that the stream has stored per (target, group), targets ascending, and writes the sum to the
/// entry's CSR position. A withheld step stores no dot products: the sum is then 0.
__global__ void sum_dots(const std::int64_t* offsets, std::int64_t n_keys, const std::uint32_t* keys,
                         std::int64_t n_features, int n_layers, bool cross_layer, int groups, HitStream stream,
                         const AdamStep* adam, float* out) {
  const bool withheld = adam != nullptr && adam->withheld != 0;
  const std::int64_t total = offsets[n_keys];
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < total; i += step) {
    const std::uint32_t at = stream.position[i];
    const int source = static_cast<int>(keys[at] / n_features);
    float sum = 0.0f;
    const int end = (cross_layer ? n_layers : source + 1) * groups;
    for (int slot = source * groups; slot < end && !withheld; ++slot)
      sum += __ldcs(stream.partial + slot * stream.capacity + i);
    out[at] = sum;
  }
}

__global__ void sum_norms(HitStream stream, std::int64_t n_features, int n_layers, bool cross_layer, int groups,
                          const AdamStep* step, double* out) {
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (key >= n_layers * n_features) return;
  const int source = static_cast<int>(key / n_features);
  const std::int64_t feature = key % n_features;
  const double scale = step == nullptr ? 1.0 : step->gradient_scale;
  const bool withheld = step != nullptr && step->withheld != 0;
  double sum = 0.0;
  for (std::int64_t target = source; target < (cross_layer ? n_layers : source + 1) && !withheld; ++target)
    for (int group = 0; group < groups; ++group)
      sum += stream.norm[((cross_layer ? target * (target + 1) / 2 + source : source) * groups + group) * n_features +
                         feature];
  out[key] = scale * scale * sum;
}

/// Forms norm[key] from the sums of squares that the stream has stored, in the order of square_of. A withheld step
/// stores none.
__global__ void form_new_norms(HitStream stream, std::int64_t n_features, int n_layers, bool cross_layer, int groups,
                               const AdamStep* step, float* norm) {
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (key >= n_layers * n_features || step->withheld != 0) return;
  const int source = static_cast<int>(key / n_features);
  const std::int64_t feature = key % n_features;
  float sum = 0.0f;
  for (std::int64_t target = source; target < (cross_layer ? n_layers : source + 1); ++target)
    for (int group = 0; group < groups; ++group)
      sum += stream.weight_square[((cross_layer ? target * (target + 1) / 2 + source : source) * groups + group) *
                                      n_features +
                                  feature];
  norm[key] = __fsqrt_rn(sum);
}

/// Decoder rows of all layers, as kernel arguments.
struct WeightRows {
  struct {
    const std::uint16_t* weight;
    const std::int16_t* rest;
    std::int64_t columns;
  } layer[kMostLayers];
};

/// Forms norms from the stored weights with the bits of form_new_norms, for rows of segments of d_model. One warp per
/// row.
template <StorageType storage>
__global__ void norm_rows(const __grid_constant__ WeightRows weights, std::int64_t n_keys, std::int64_t n_features,
                          std::int64_t d_model, Grouping grouping, float* norm) {
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (key >= n_keys) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto& layer = weights.layer[key / n_features];
  const std::int64_t row = key % n_features * layer.columns;
  float sum = 0.0f;
  for (std::int64_t segment = 0; segment < layer.columns; segment += d_model)
    for (int group = 0; group < grouping.groups; ++group) {
      float own = 0.0f;
      for (int c = 0; c < grouping.chunks; ++c) {
        const std::int64_t inside =
            (static_cast<std::int64_t>(group) * grouping.chunks + c) * kBlockColumns + lane * kLaneColumns;
        if (inside >= d_model) continue;
        LaneState<storage> state{};
        state.weight = __ldcs(reinterpret_cast<const uint4*>(layer.weight + row + segment + inside));
        if constexpr (storage == StorageType::fp32)
          state.rest = __ldcs(reinterpret_cast<const uint4*>(layer.rest + row + segment + inside));
        own += square_of(state);
      }
      sum += warp_sum(own);
    }
  if (lane == 0) norm[key] = __fsqrt_rn(sum);
}

/// Forms norms of rows of any width, which the stream does not support. One warp per row.
__global__ void norm_rows_any(const __grid_constant__ WeightRows weights, std::int64_t n_keys, std::int64_t n_features,
                              float* norm) {
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (key >= n_keys) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto& layer = weights.layer[key / n_features];
  const std::int64_t row = key % n_features * layer.columns;
  float own = 0.0f;
  for (std::int64_t column = lane; column < layer.columns; column += kWarp) {
    std::uint32_t bits = static_cast<std::uint32_t>(layer.weight[row + column]) << 16;
    if (layer.rest != nullptr) bits += static_cast<std::uint32_t>(static_cast<std::int32_t>(layer.rest[row + column]));
    own = fmaf(__uint_as_float(bits), __uint_as_float(bits), own);
  }
  own = warp_sum(own);
  if (lane == 0) norm[key] = __fsqrt_rn(own);
}

/// True if the stream supports these rows.
bool has_stream_storage(std::span<const ParameterRows> decoder) {
  return std::ranges::all_of(decoder, [](const ParameterRows& p) { return has_vector_storage(p); });
}

void form_norms(cudaStream_t queue, std::span<const ParameterRows> decoder, Array<float> norm) {
  WeightRows weights{};
  for (std::size_t s = 0; s < decoder.size(); ++s)
    weights.layer[s] = {static_cast<const std::uint16_t*>(decoder[s].weight),
                        decoder[s].storage == StorageType::fp32 ? decoder[s].weight_rest : nullptr, decoder[s].columns};
  const std::int64_t n_features = decoder[0].rows, n_keys = n_features * std::ssize(decoder);
  if (n_keys == 0) return;
  const unsigned blocks = blocks_for(n_keys, 8);
  const std::int64_t d_model = decoder[0].segment;
  if (!has_stream_storage(decoder))
    norm_rows_any<<<blocks, 256, 0, queue>>>(weights, n_keys, n_features, norm.data);
  else if (decoder[0].storage == StorageType::fp32)
    norm_rows<StorageType::fp32>
        <<<blocks, 256, 0, queue>>>(weights, n_keys, n_features, d_model, grouping_of(d_model), norm.data);
  else
    norm_rows<StorageType::bf16>
        <<<blocks, 256, 0, queue>>>(weights, n_keys, n_features, d_model, grouping_of(d_model), norm.data);
  require_launch("decoder_norms");
}

template <class Epilogue>
void backward(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
              const AnyMatrix& gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
              Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
              const LateRows& late, Array<float> new_norms, const Epilogue& epilogue) {
  require_layers("decode_backward", decoder.size());
  const cudaStream_t queue = stream_of(execution);
  const std::int64_t n_layers = static_cast<std::int64_t>(decoder.size());
  const std::int64_t n_features = activations.n_features, n_keys = n_layers * n_features;
  const std::int64_t d_model = decoder[0].segment;
  const bool cross_layer = is_cross_layer(decoder);
  for (const ParameterRows& p : decoder) require_cuda_storage(p);
  const bool vector = gradient_rows.type == Scalar::bf16 && gradient_rows.stride % kLaneColumns == 0 &&
                      is_aligned(gradient_rows.data, 16) && has_stream_storage(decoder);
  if (!vector) {
    if (late.wait) late.wait();
    for (std::int64_t s = 0; s < n_layers; ++s)
      launch_rows(queue,
                  {hits.offsets.data, hits.token.data, hits.position.data, activations.value.data, gradient_rows,
                   s * d_model, s * n_features, n_features, decoder[static_cast<std::size_t>(s)], step,
                   activation_gradient.data, squared_norm.data},
                  epilogue);
    if (new_norms.data != nullptr) form_norms(queue, decoder, new_norms);
    return;
  }

  const Grouping grouping = grouping_of(d_model);
  const std::int64_t capacity = activations.key.size, units = n_layers * (n_layers + 1) / 2 * grouping.groups;
  StreamArguments a{};
  if (place_stream(workspace.data, n_layers, n_features, capacity, n_layers * grouping.groups, units,
                   new_norms.data != nullptr, &a.stream) > workspace.size)
    throw Error(ExitCode::internal, "decode_backward: workspace is smaller than decode_backward_workspace");
  prepare_stream(queue, activations, hits, activations.value.data, step, a.stream);
  a.offsets = hits.offsets.data;
  a.rows = static_cast<const char*>(gradient_rows.data);
  a.row_bytes = gradient_rows.stride * 2;
  a.n_features = n_features;
  a.first_row = decoder[0].first_row;
  a.n_layers = static_cast<int>(n_layers);
  a.d_model = static_cast<int>(d_model);
  a.groups = grouping.groups;
  a.with_norm = squared_norm.data != nullptr;
  a.step = step;
  for (std::size_t s = 0; s < decoder.size(); ++s) a.layer[s] = pointers_of(decoder[s]);
  const auto stream_targets = [&](std::int64_t begin, std::int64_t end) {
    const auto units_before = [&](std::int64_t target) {
      return (cross_layer ? target * (target + 1) / 2 : target) * grouping.groups;
    };
    a.target_begin = begin;
    a.target_end = end;
    a.first_item = units_before(begin) * a.stream.blocks;
    a.items = units_before(end) * a.stream.blocks;
    require(cudaMemsetAsync(a.stream.next_item, 0, sizeof(std::uint32_t), queue), "cudaMemsetAsync");
    const auto launch = [&]<StreamKind kind>() {
      if (step != nullptr)
        launch_stream<kind, true>(queue, decoder[0].storage, grouping, a, epilogue);
      else
        launch_stream<kind, false>(queue, decoder[0].storage, grouping, a, epilogue);
    };
    if (cross_layer)
      launch.template operator()<StreamKind::cross_layer>();
    else
      launch.template operator()<StreamKind::per_layer>();
  };
  const std::int64_t split = late.wait ? late.first : 0;
  stream_targets(split, n_layers);
  if (late.wait) late.wait();
  if (split > 0) stream_targets(0, split);
  sum_dots<<<blocks_for(capacity, 256, multiprocessors() * 16), 256, 0, queue>>>(
      hits.offsets.data, n_keys, activations.key.data, n_features, a.n_layers, cross_layer, a.groups, a.stream, step,
      activation_gradient.data);
  if (a.with_norm)
    sum_norms<<<blocks_for(n_keys, 256), 256, 0, queue>>>(a.stream, n_features, a.n_layers, cross_layer, a.groups, step,
                                                          squared_norm.data);
  if (new_norms.data != nullptr)
    form_new_norms<<<blocks_for(n_keys, 256), 256, 0, queue>>>(a.stream, n_features, a.n_layers, cross_layer, a.groups,
                                                               step, new_norms.data);
  require_launch("decode_backward");
}

}  // namespace

void decoder_norms(const Execution& execution, std::span<const ParameterRows> decoder, Array<float> norm) {
  require_layers("decoder_norms", decoder.size());
  for (const ParameterRows& p : decoder) require_cuda_storage(p);
  form_norms(stream_of(execution), decoder, norm);
}

std::int64_t decode_backward_workspace(Backend, std::int64_t n_layers, std::int64_t n_features, std::int64_t d_model,
                                       std::int64_t capacity, bool norms) {
  const std::int64_t groups = grouping_of(d_model).groups;
  return place_stream(nullptr, n_layers, n_features, capacity, n_layers * groups,
                      n_layers * (n_layers + 1) / 2 * groups, norms, nullptr);
}

void decode_backward_update(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                            AnyMatrix gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                            Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
                            const LateRows& late, Array<const float> factors, Array<float> new_norms) {
  if (new_norms.data != nullptr && (factors.data == nullptr || step == nullptr))
    throw Error(ExitCode::internal, "decode_backward_update: new norms are formed by an update with factors");
  const auto with = [&](const auto& epilogue) {
    backward(execution, activations, hits, gradient_rows, decoder, step, activation_gradient, squared_norm, workspace,
             late, new_norms, epilogue);
  };
  if (factors.data != nullptr)
    with(RowEpilogue<RowFactors>{.extra = {factors.data}});
  else
    with(RowEpilogue<>{});
}

void decode_backward_norm(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                          AnyMatrix gradient_rows, std::span<const ParameterRows> decoder,
                          Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
                          const LateRows& late, Array<const float> factors) {
  cuda::decode_backward_update(execution, activations, hits, gradient_rows, decoder, nullptr, activation_gradient,
                               squared_norm, workspace, late, factors, {});
}

void decode_backward_noisy(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                           AnyMatrix gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                           Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
                           const LateRows& late, const RowNoise& noise) {
  backward(execution, activations, hits, gradient_rows, decoder, step, activation_gradient, squared_norm, workspace,
           late, {}, NoisyEpilogue{.noise = noise});
}

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The encoder's backward pass: the stream of feature_stream_cuda.cuh without dot products, one target per source; then
// the biases, whose gradients are sums over the same hits.
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/sparse/feature_rows_cuda.cuh"
#include "kernels/transcoder/sparse/feature_stream_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

struct BiasPointers {
  float *weight, *first, *second;
};
struct BiasArguments {
  const std::int64_t* offsets;
  const std::uint32_t* position;
  const float* value;      // dz by CSR position
  const float* value_sum;  // bias gradients if the stream has formed them, or null
  std::int64_t n_keys, n_features;
  std::int64_t first_row;  // global index of feature 0; with noise
  const AdamStep* step;    // null: no update
  const float* row_norm;   // [L * groups, F] sums of squares from the stream, or null
  int groups;
  double* norm;  // by key, or null; if row_norm is null the squares are added to it
  BiasPointers layer[kMostLayers];
};

// One warp per 32 features. Every lane sums the hits of its own feature, in order; those of a hot one are summed by all
// lanes together.
template <class Noise>
__global__ void finish_biases(const __grid_constant__ BiasArguments a, const __grid_constant__ Noise noise) {
  if (a.step != nullptr && a.step->withheld != 0) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t key = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  const bool mine = key < a.n_keys;
  const std::int64_t begin = mine ? a.offsets[key] : 0, end = mine ? a.offsets[key + 1] : 0;
  const bool hot = end - begin > kHotHits;
  float gradient = 0.0f;
  if (a.value_sum != nullptr) {
    if (mine) gradient = a.value_sum[key];
  } else {
    if (!hot)
      for (std::int64_t hit = begin; hit < end; ++hit) gradient += a.value[a.position[hit]];
    for (std::uint32_t left = __ballot_sync(kAllLanes, hot); left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      const long long from = __shfl_sync(kAllLanes, static_cast<long long>(begin), owner);
      const long long to = __shfl_sync(kAllLanes, static_cast<long long>(end), owner);
      float sum = 0.0f;
      for (long long hit = from + lane; hit < to; hit += kWarp) sum += a.value[a.position[hit]];
      sum = warp_sum(sum);
      if (lane == owner) gradient = sum;
    }
  }
  if (!mine) return;
  const std::int64_t layer = key / a.n_features, feature = key % a.n_features;
  gradient = noise.of_layer(layer).add_to(gradient, static_cast<std::uint64_t>(a.first_row + feature), feature);
  float scale = 1.0f;
  if (a.step != nullptr) {
    const AdamStep adam = *a.step;
    scale = adam.gradient_scale;
    const BiasPointers& b = a.layer[layer];
    float w = b.weight[feature], m = b.first[feature], v = b.second[feature];
    adam_rule(adam, 0.0f, gradient, w, m, v);
    b.weight[feature] = w;
    b.first[feature] = m;
    b.second[feature] = v;
  }
  if (a.norm != nullptr) {
    const double g = static_cast<double>(scale) * gradient;
    double rows = 0.0;
    if (a.row_norm != nullptr) {
      for (int group = 0; group < a.groups; ++group)
        rows += a.row_norm[(layer * a.groups + group) * a.n_features + feature];
      rows *= static_cast<double>(scale) * scale;
    } else {
      rows = a.norm[key];
    }
    a.norm[key] = rows + g * g;
  }
}

template <class Noise>
void launch_biases(cudaStream_t queue, const BiasArguments& a, const Noise& noise) {
  if (a.n_keys == 0) return;
  finish_biases<<<blocks_for(a.n_keys, 128), 128, 0, queue>>>(a, noise);
  require_launch("encode_backward: biases");
}

template <class Epilogue, class BiasNoise>
void backward(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
              const AnyMatrix& x, Array<const float> preactivation_gradient, std::span<const ParameterRows> encoder,
              std::span<const ParameterVector> bias, const AdamStep* step, Array<double> squared_norm,
              Array<std::byte> workspace, const Epilogue& epilogue, const BiasNoise& bias_noise) {
  require_layers("encode_backward", static_cast<std::size_t>(activations.n_layers));
  const cudaStream_t queue = stream_of(execution);
  const std::int64_t n_layers = activations.n_layers, n_features = activations.n_features;
  const std::int64_t d_model = x.columns / n_layers;
  BiasArguments b{};
  b.offsets = hits.offsets.data;
  b.position = hits.position.data;
  b.value = preactivation_gradient.data;
  b.n_keys = n_layers * n_features;
  b.n_features = n_features;
  b.first_row = encoder.empty() ? 0 : encoder[0].first_row;
  b.step = step;
  b.norm = squared_norm.data;
  for (std::size_t s = 0; s < bias.size(); ++s)
    b.layer[s] = {bias[s].weight.data, bias[s].first_moment.data, bias[s].second_moment.data};

  bool vector =
      x.type == Scalar::bf16 && x.stride % kLaneColumns == 0 && d_model % kLaneColumns == 0 && is_aligned(x.data, 16);
  for (const ParameterRows& p : encoder) {
    require_cuda_storage(p);
    vector = vector && has_vector_storage(p);
  }
  if (!vector) {
    ParameterRows shape;
    shape.rows = n_features;
    shape.columns = shape.segment = d_model;
    for (std::int64_t s = 0; s < n_layers; ++s)
      launch_rows(queue,
                  {hits.offsets.data, hits.token.data, hits.position.data, preactivation_gradient.data, x, s * d_model,
                   s * n_features, n_features, encoder.empty() ? shape : encoder[static_cast<std::size_t>(s)], step,
                   nullptr, squared_norm.data},
                  epilogue);
    launch_biases(queue, b, bias_noise);
    return;
  }

  const Grouping grouping = grouping_of(d_model);
  StreamArguments a{};
  if (place_stream(workspace.data, n_layers, n_features, activations.key.size, 0, n_layers * grouping.groups, false,
                   &a.stream) > workspace.size)
    throw Error(ExitCode::internal, "encode_backward: workspace is smaller than encode_backward_workspace");
  prepare_stream(queue, activations, hits, preactivation_gradient.data, step, a.stream);
  a.offsets = hits.offsets.data;
  a.rows = static_cast<const char*>(x.data);
  a.row_bytes = x.stride * 2;
  a.n_features = n_features;
  a.first_row = b.first_row;
  a.target_end = n_layers;
  a.items = n_layers * grouping.groups * a.stream.blocks;
  require(cudaMemsetAsync(a.stream.next_item, 0, sizeof(std::uint32_t), queue), "cudaMemsetAsync");
  a.n_layers = static_cast<int>(n_layers);
  a.d_model = static_cast<int>(d_model);
  a.groups = grouping.groups;
  a.with_norm = squared_norm.data != nullptr;
  a.step = step;
  for (std::size_t s = 0; s < encoder.size(); ++s) a.layer[s] = pointers_of(encoder[s]);
  if (step != nullptr)
    launch_stream<StreamKind::encoder, true>(queue, encoder[0].storage, grouping, a, epilogue);
  else
    launch_stream<StreamKind::encoder, false>(queue, StorageType::bf16, grouping, a, epilogue);
  b.value_sum = a.stream.value_sum;
  b.row_norm = a.stream.norm;
  b.groups = grouping.groups;
  launch_biases(queue, b, bias_noise);
}

}  // namespace

std::int64_t encode_backward_workspace(Backend, std::int64_t n_layers, std::int64_t n_features, std::int64_t d_model,
                                       std::int64_t capacity) {
  return place_stream(nullptr, n_layers, n_features, capacity, 0, n_layers * grouping_of(d_model).groups, false,
                      nullptr);
}

void encode_backward_update(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                            AnyMatrix x, Array<const float> preactivation_gradient,
                            std::span<const ParameterRows> encoder, std::span<const ParameterVector> bias,
                            const AdamStep* step, Array<double> squared_norm, Array<std::byte> workspace) {
  backward(execution, activations, hits, x, preactivation_gradient, encoder, bias, step, squared_norm, workspace,
           RowEpilogue<>{}, NoRowNoise{});
}

void encode_backward_norm(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                          AnyMatrix x, Array<const float> preactivation_gradient, Array<double> squared_norm,
                          Array<std::byte> workspace) {
  backward(execution, activations, hits, x, preactivation_gradient, {}, {}, nullptr, squared_norm, workspace,
           RowEpilogue<>{}, NoRowNoise{});
}

void encode_backward_noisy(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                           AnyMatrix x, Array<const float> preactivation_gradient,
                           std::span<const ParameterRows> encoder, std::span<const ParameterVector> bias,
                           const AdamStep* step, Array<double> squared_norm, Array<std::byte> workspace,
                           const RowNoise& noise, const RowNoise& bias_noise) {
  backward(execution, activations, hits, x, preactivation_gradient, encoder, bias, step, squared_norm, workspace,
           NoisyEpilogue{.noise = noise}, bias_noise);
}

}  // namespace weft::kernels::cuda

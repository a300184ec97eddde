// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

struct Shape {
  std::int64_t n_tokens, n_layers, n_features, d_model;
  double density;
};
// As in decode_test.cpp.
constexpr Shape kShapes[] = {
    {1, 1, 1, 1, 1.0},        {7, 2, 13, 770, 0.2},   {1, 3, 50, 5, 0.3},       {40, 5, 31, 33, 0.1},
    {9, 2, 6001, 3, 0.002},   {1, 1, 33, 8, 0.2},     {129, 3, 100, 384, 0.03}, {300, 4, 70, 768, 0.03},
    {2100, 1, 64, 256, 0.02}, {64, 2, 33, 2048, 0.1}, {50, 2, 20, 2304, 0.1},   {140, 2, 65, 13, 0.1},
    {140, 2, 65, 512, 0.1},   {50, 1, 20, 2560, 0.1},
};

/// Encoders and biases of all layers in a trained state.
struct Encoder {
  std::vector<Parameters> weights;
  std::vector<DeviceArray<float>> bias, bias_first, bias_second;
  std::vector<ParameterRows> weight_views;
  std::vector<ParameterVector> bias_views;

  Encoder(Backend backend, const Shape& shape, StorageType storage) {
    for (std::int64_t s = 0; s < shape.n_layers; ++s) {
      weights.emplace_back(backend, storage, shape.n_features, shape.d_model, shape.d_model, 0,
                           s * shape.n_features * shape.d_model);
      weights.back().set(random_state(shape.n_features * shape.d_model, 100 + s));
      const Values state = random_state(shape.n_features, 200 + s);
      bias.emplace_back(state.weight);
      bias_first.emplace_back(state.first_moment);
      bias_second.emplace_back(state.second_moment);
      weight_views.push_back(weights.back().view());
      bias_views.push_back({bias.back().array(), bias_first.back().array(), bias_second.back().array()});
    }
  }
};

/// The workspace of the backward passes, filled with garbage.
DeviceArray<std::byte> workspace_of(const Execution& execution, const Shape& shape, const Sparse& sparse) {
  const std::int64_t bytes =
      encode_backward_workspace(execution.backend, shape.n_layers, shape.n_features, shape.d_model, sparse.capacity());
  return DeviceArray<std::byte>(std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0x5a}));
}

/// dW_enc and db of one layer in float64, with the sums of magnitudes that bound their rounding.
struct Gradient64 {
  std::vector<double> weight, weight_magnitude, bias, bias_magnitude;
};

Gradient64 gradient64(const Shape& shape, const Sparse& sparse, const std::vector<float>& dz,
                      const std::vector<float>& x, std::int64_t layer) {
  const std::int64_t d = shape.d_model, width = shape.n_layers * d;
  Gradient64 out;
  out.weight.resize(shape.n_features * d);
  out.weight_magnitude.resize(shape.n_features * d);
  out.bias.resize(shape.n_features);
  out.bias_magnitude.resize(shape.n_features);
  for (std::int64_t n = 0; n < shape.n_tokens; ++n)
    for (std::int64_t e = sparse.row_offsets[n]; e < sparse.row_offsets[n + 1]; ++e) {
      if (sparse.key[e] / shape.n_features != layer) continue;
      const std::int64_t f = sparse.key[e] % shape.n_features;
      out.bias[f] += dz[e];
      out.bias_magnitude[f] += std::abs(dz[e]);
      for (std::int64_t i = 0; i < d; ++i) {
        const double term = static_cast<double>(dz[e]) * x[n * width + layer * d + i];
        out.weight[f * d + i] += term;
        out.weight_magnitude[f * d + i] += std::abs(term);
      }
    }
  return out;
}

}  // namespace

TEST_CASE("encode_backward_noisy adds the numbers of add_noise to the gradients of encode_backward_update") {
  const NoiseKey key{1, 2, 3, 4, 5, 6, 7, 8};
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : {kShapes[1], kShapes[3], kShapes[7], kShapes[8]})
      for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
        CAPTURE(shape.d_model);
        const std::int64_t d = shape.d_model, width = shape.n_layers * d, n_features = shape.n_features;
        const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, n_features, shape.density, 1);
        const TestMatrix x(random_floats(shape.n_tokens * width, 2), shape.n_tokens, width, type);
        const DeviceArray<float> dz(random_floats(sparse.size(), 3, 0.1f));
        const Encoder plain(execution.backend, shape, StorageType::fp32),
            noisy(execution.backend, shape, StorageType::fp32);
        // The first moments are the gradients.
        AdamStep adam = test_step();
        adam.beta1 = 0;
        adam.first_gain = adam.gradient_scale = 1;
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});
        encode_backward_update(execution, sparse.csr(), sparse.csc(), x.view(), dz.array(), plain.weight_views,
                               plain.bias_views, step.data(), {}, workspace_of(execution, shape, sparse).array());
        const auto noise = [&](std::uint64_t parameter) -> RowNoise {
          return {.stream = noise_stream(key, 3, parameter), .stride = 2, .deviation = 0.25, .scale = 0.5};
        };
        encode_backward_noisy(execution, sparse.csr(), sparse.csc(), x.view(), dz.array(), noisy.weight_views,
                              noisy.bias_views, step.data(), {}, workspace_of(execution, shape, sparse).array(),
                              noise(5), noise(6));
        for (std::int64_t s = 0; s < shape.n_layers; ++s) {
          const auto agree = [&](const std::vector<float>& with, const std::vector<float>& without, std::int64_t of) {
            const DeviceArray<float> numbers(std::vector<float>(without.size(), 0.0f));
            add_noise(execution, numbers.array(), 0.25, noise_stream(key, 3, static_cast<std::uint64_t>(of + 2 * s)),
                      0);
            const std::vector<float> number = numbers.values();
            for (std::size_t i = 0; i < with.size(); ++i)
              REQUIRE(std::abs(with[i] - 0.5f * (without[i] + number[i])) <=
                      4 * kRoundoff * (std::abs(without[i]) + std::abs(number[i])));
          };
          agree(noisy.weights[s].values().first_moment, plain.weights[s].values().first_moment, 5);
          agree(noisy.bias_first[s].values(), plain.bias_first[s].values(), 6);
        }
      }
  });
}

TEST_CASE("encode_backward_update: weights, biases and norms agree with float64") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies)
        for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
          CAPTURE(shape.d_model);
          CAPTURE(static_cast<int>(storage));
          const std::int64_t d = shape.d_model, width = shape.n_layers * d, n_features = shape.n_features;
          const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, n_features, shape.density, 1);
          const TestMatrix x(random_floats(shape.n_tokens * width, 2), shape.n_tokens, width, type);
          const std::vector<float> inputs = x.values();
          std::vector<float> dz = random_floats(sparse.size(), 3, 0.1f);
          for (std::size_t i = 0; i < dz.size(); i += 3) dz[i] = 0.0f;  // listed entries that are not active
          const DeviceArray<float> device_dz(dz);
          const Encoder encoder(execution.backend, shape, storage);
          std::vector<Values> before;
          for (const Parameters& p : encoder.weights) before.push_back(p.values());
          const AdamStep adam = test_step();
          const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});
          const DeviceArray<double> norm_first(sparse.n_keys()), norm(sparse.n_keys());
          encode_backward_norm(execution, sparse.csr(), sparse.csc(), x.view(), device_dz.array(), norm_first.array(),
                               workspace_of(execution, shape, sparse).array());
          encode_backward_update(execution, sparse.csr(), sparse.csc(), x.view(), device_dz.array(),
                                 encoder.weight_views, encoder.bias_views, step.data(), norm.array(),
                                 workspace_of(execution, shape, sparse).array());
          // The CUDA stream sums squares in fp32 over at most 128 columns per lane and then a tree.
          const double sum_roundings = execution.backend == Backend::cuda ? 140 * kRoundoff : 1e-12;
          const std::vector<double> norms_first = norm_first.values(), norms = norm.values();
          for (std::int64_t s = 0; s < shape.n_layers; ++s) {
            const Gradient64 expected = gradient64(shape, sparse, dz, inputs, s);
            const Values bias = random_state(n_features, 200 + s);
            const std::vector<float> bias_after = encoder.bias[s].values();
            std::vector<double> error(n_features * d);
            for (std::int64_t f = 0; f < n_features; ++f) {
              const std::int64_t key = s * n_features + f;
              // h products summed in fp32: at most h + 1 roundings on the magnitudes.
              const double roundings = (sparse.offsets[key + 1] - sparse.offsets[key] + 1) * kRoundoff;
              double square = expected.bias[f] * expected.bias[f],
                     square_error = 2 * std::abs(expected.bias[f]) * roundings * expected.bias_magnitude[f];
              for (std::int64_t i = f * d; i < (f + 1) * d; ++i) {
                error[i] = roundings * expected.weight_magnitude[i];
                square += expected.weight[i] * expected.weight[i];
                square_error += 2 * std::abs(expected.weight[i]) * error[i];
              }
              REQUIRE(std::abs(norms_first[key] - square) <= square_error * 1.001 + sum_roundings * square);
              const double scale = static_cast<double>(adam.gradient_scale) * adam.gradient_scale;
              REQUIRE(std::abs(norms[key] - scale * square) <=
                      scale * (square_error * 1.001 + (3 * kRoundoff + sum_roundings) * square));
              const double b =
                  adam64(adam, 0.0, bias.weight[f], bias.first_moment[f], bias.second_moment[f], expected.bias[f])
                      .weight;
              // The bias moves by at most learning_rate times a direction of order 1..100, all in fp32.
              REQUIRE(std::abs(bias_after[f] - b) <= 1e-5 * (1 + std::abs(b)));
            }
            CHECK(agrees_with_adam(encoder.weights[s], before[s], expected.weight, error, adam));
          }
        }
  });
}

TEST_CASE("explicit encoder gradients with adam_rows and adam_vector give the bits of the fused update") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies) {
        const std::int64_t d = shape.d_model, width = shape.n_layers * d;
        const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
        const TestMatrix x(random_floats(shape.n_tokens * width, 2), shape.n_tokens, width, Scalar::bf16);
        const DeviceArray<float> dz(random_floats(sparse.size(), 3, 0.1f));
        const Encoder fused(execution.backend, shape, storage), again(execution.backend, shape, storage),
            apart(execution.backend, shape, storage);
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
        encode_backward_update(execution, sparse.csr(), sparse.csc(), x.view(), dz.array(), fused.weight_views,
                               fused.bias_views, step.data(), {}, workspace_of(execution, shape, sparse).array());
        encode_backward_update(execution, sparse.csr(), sparse.csc(), x.view(), dz.array(), again.weight_views,
                               again.bias_views, step.data(), {}, workspace_of(execution, shape, sparse).array());
        for (std::int64_t s = 0; s < shape.n_layers; ++s) {
          CHECK((fused.weights[s].bits() == again.weights[s].bits()));
          CHECK(fused.bias[s].values() == again.bias[s].values());
        }
        // The scalar CUDA kernels of the two leave the contraction of multiply-adds to the compiler.
        if (execution.backend == Backend::cuda && d % 8 != 0) continue;
        const Encoder gradients(execution.backend, shape, StorageType::fp32);
        const DeviceArray<AdamStep> no_step(std::vector<AdamStep>{gradient_step()});
        encode_backward_update(execution, sparse.csr(), sparse.csc(), x.view(), dz.array(), gradients.weight_views,
                               gradients.bias_views, no_step.data(), {},
                               workspace_of(execution, shape, sparse).array());
        for (std::int64_t s = 0; s < shape.n_layers; ++s) {
          adam_rows(execution, apart.weight_views[s], 0, first_moment(gradients.weights[s]), step.data());
          adam_vector(execution, apart.bias_views[s], gradients.bias_first[s].array(), step.data());
          CHECK((fused.weights[s].bits() == apart.weights[s].bits()));
          if (execution.backend == Backend::cuda) continue;  // biases as above
          CHECK(fused.bias[s].values() == apart.bias[s].values());
          CHECK(fused.bias_second[s].values() == apart.bias_second[s].values());
        }
      }
  });
}

}  // namespace weft::testing

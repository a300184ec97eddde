// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/decode/decode.hpp"

#include "kernels/convert/convert_rows.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/dense/dense_products.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

struct Shape {
  std::int64_t n_tokens, n_layers, n_features, d_model;
  double density;
  bool cross_layer = true;

  /// Layers that a feature of source layer s writes to, from s on.
  std::int64_t targets(std::int64_t s) const { return cross_layer ? n_layers - s : 1; }
};
// One of everything; uneven sizes; N = 1; d beyond one chunk and odd; a token with thousands of active features. Then
// widths of the vectorised CUDA kernels: partly filled chunks (8, 384), whole ones (768), odd multiples of 512 (512,
// 2560), several column groups (2048, 2304, 2560), and features with more hits than one warp takes; 13: their scalar
// path with such features. Last, decoders per layer.
// clang-format off
constexpr Shape kShapes[] = {
    {1, 1, 1, 1, 1.0},               {7, 2, 13, 770, 0.2},
    {1, 3, 50, 5, 0.3},              {40, 5, 31, 33, 0.1},
    {9, 2, 6001, 3, 0.002},          {1, 1, 33, 8, 0.2},
    {129, 3, 100, 384, 0.03},        {300, 4, 70, 768, 0.03},
    {2100, 1, 64, 256, 0.02},        {64, 2, 33, 2048, 0.1},
    {50, 2, 20, 2304, 0.1},          {140, 2, 65, 13, 0.1},
    {40, 5, 31, 33, 0.1, false},     {129, 3, 100, 384, 0.03, false},
    {30, 40, 70, 8, 0.1, false},     {140, 3, 70, 768, 0.1, false},
    {140, 2, 65, 512, 0.1},          {50, 1, 20, 2560, 0.1},
    {70, 2, 40, 512, 0.1, false},    {40, 1, 20, 3584, 0.1},
};
// clang-format on

/// A decoder for each layer, in a trained state.
std::vector<Parameters> decoders(Backend backend, const Shape& shape, StorageType storage) {
  std::vector<Parameters> out;
  std::uint64_t base = 0;
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    const std::int64_t columns = shape.targets(s) * shape.d_model;
    out.emplace_back(backend, storage, shape.n_features, columns, shape.d_model, 0, base);
    out.back().set(random_state(shape.n_features * columns, 100 + s));
    base += shape.n_features * columns;
  }
  return out;
}

std::vector<ParameterRows> views(const std::vector<Parameters>& parameters) {
  std::vector<ParameterRows> out;
  for (const Parameters& p : parameters) out.push_back(p.view());
  return out;
}

/// The workspace of the backward passes, filled with garbage.
DeviceArray<std::byte> workspace_of(const Execution& execution, const Shape& shape, const Sparse& sparse) {
  const std::int64_t bytes = decode_backward_workspace(execution.backend, shape.n_layers, shape.n_features,
                                                       shape.d_model, sparse.capacity(), false);
  return DeviceArray<std::byte>(std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0x5a}));
}

/// The values of the entries in use.
std::vector<float> used(const DeviceArray<float>& by_position, const Sparse& sparse) {
  std::vector<float> all = by_position.values();
  all.resize(static_cast<std::size_t>(sparse.size()));
  return all;
}

/// dW of every layer, as the first moments of fp32 state.
std::vector<Parameters> explicit_gradients(const Execution& execution, const Shape& shape, const Sparse& sparse,
                                           const TestMatrix& rows) {
  std::vector<Parameters> out = decoders(execution.backend, shape, StorageType::fp32);
  const DeviceArray<float> activation_gradient(sparse.capacity());
  const DeviceArray<AdamStep> step(std::vector<AdamStep>{gradient_step()});
  decode_backward_update(execution, sparse.csr(), sparse.csc(), rows.view(), views(out), step.data(),
                         activation_gradient.array(), {}, workspace_of(execution, shape, sparse).array(), {}, {}, {});
  return out;
}

/// y in float64 from the definition, and the sum of magnitudes that bounds its rounding.
struct Sums {
  std::vector<double> value, magnitude;
  explicit Sums(std::int64_t size) : value(size), magnitude(size) {}
  void add(std::int64_t i, double x) {
    value[i] += x;
    magnitude[i] += std::abs(x);
  }
};

Sums forward64(const Shape& shape, const Sparse& sparse, const std::vector<std::vector<float>>& weight) {
  const std::int64_t width = shape.n_layers * shape.d_model;
  Sums y(shape.n_tokens * width);
  for (std::int64_t n = 0; n < shape.n_tokens; ++n)
    for (std::int64_t e = sparse.row_offsets[n]; e < sparse.row_offsets[n + 1]; ++e) {
      const std::int64_t s = sparse.key[e] / shape.n_features, f = sparse.key[e] % shape.n_features;
      for (std::int64_t t = s; t < s + shape.targets(s); ++t)
        for (std::int64_t i = 0; i < shape.d_model; ++i)
          y.add(n * width + t * shape.d_model + i,
                static_cast<double>(sparse.value[e]) *
                    weight[s][f * shape.targets(s) * shape.d_model + (t - s) * shape.d_model + i]);
    }
  return y;
}

/// da [entries] and dW [layer][F * columns] in float64.
struct Gradients {
  Sums activation;
  std::vector<Sums> weight;
};

Gradients backward64(const Shape& shape, const Sparse& sparse, const std::vector<std::vector<float>>& weight,
                     const std::vector<float>& rows) {
  const std::int64_t width = shape.n_layers * shape.d_model;
  Gradients out{Sums(sparse.size()), {}};
  for (const auto& w : weight) out.weight.emplace_back(std::ssize(w));
  for (std::int64_t n = 0; n < shape.n_tokens; ++n)
    for (std::int64_t e = sparse.row_offsets[n]; e < sparse.row_offsets[n + 1]; ++e) {
      const std::int64_t s = sparse.key[e] / shape.n_features, f = sparse.key[e] % shape.n_features;
      const std::int64_t columns = shape.targets(s) * shape.d_model;
      for (std::int64_t c = 0; c < columns; ++c) {
        const double g = rows[n * width + s * shape.d_model + c];
        out.activation.add(e, g * weight[s][f * columns + c]);
        out.weight[s].add(f * columns + c, g * sparse.value[e]);
      }
    }
  return out;
}

std::int64_t most_entries(const std::vector<std::int64_t>& offsets) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) most = std::max(most, offsets[i + 1] - offsets[i]);
  return most;
}

}  // namespace

TEST_CASE("decode_forward agrees with the plain sum for every shape and storage") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies)
        for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
          CAPTURE(shape.d_model);
          CAPTURE(static_cast<int>(storage));
          const std::int64_t width = shape.n_layers * shape.d_model;
          const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
          const std::vector<Parameters> parameters = decoders(execution.backend, shape, storage);
          std::vector<std::vector<float>> weight;
          for (const Parameters& p : parameters) weight.push_back(p.read_weights());
          const Sums expected = forward64(shape, sparse, weight);
          // Filled before: forward must overwrite everything, rows without entries with zeros.
          const TestMatrix y(std::vector<float>(shape.n_tokens * width, 3.0f), shape.n_tokens, width, type);
          decode_forward(execution, sparse.csr(), 0, shape.n_tokens, views(parameters), 0, y.view());
          const std::vector<float> values = y.values();
          // k products and sums in fp32: k + 1 roundings on the sum of magnitudes; then one rounding to storage.
          const double k = most_entries(sparse.row_offsets);
          for (std::size_t i = 0; i < values.size(); ++i) {
            const double sum_error = (k + 1) * kRoundoff * expected.magnitude[i];
            const double storage =
                type == Scalar::bf16 ? kRoundoffBf16 * (std::abs(expected.value[i]) + sum_error) : 0.0;
            REQUIRE(std::abs(values[i] - expected.value[i]) <= sum_error + storage);
          }
          // A range of tokens is the same rows, bit for bit.
          if (shape.n_tokens > 3) {
            const TestMatrix part(std::vector<float>(2 * width), 2, width, type);
            decode_forward(execution, sparse.csr(), 2, 2, views(parameters), 0, part.view());
            CHECK(part.values() == std::vector<float>(values.begin() + 2 * width, values.begin() + 4 * width));
          }
          // So is a range of target layers.
          for (std::int64_t target = 0; target < shape.n_layers; ++target) {
            const std::int64_t n = std::min<std::int64_t>(2, shape.n_layers - target), columns = n * shape.d_model;
            const TestMatrix part(std::vector<float>(shape.n_tokens * columns, 3.0f), shape.n_tokens, columns, type);
            decode_forward(execution, sparse.csr(), 0, shape.n_tokens, views(parameters), target, part.view());
            const std::vector<float> some = part.values();
            for (std::int64_t row = 0; row < shape.n_tokens; ++row)
              CHECK(std::equal(some.begin() + row * columns, some.begin() + (row + 1) * columns,
                               values.begin() + row * width + target * shape.d_model));
          }
        }
  });
}

TEST_CASE("decode_backward_update: activation gradients, norms and updated parameters agree with float64") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies)
        for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
          CAPTURE(shape.d_model);
          CAPTURE(static_cast<int>(storage));
          const std::int64_t width = shape.n_layers * shape.d_model;
          const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
          const std::vector<Parameters> parameters = decoders(execution.backend, shape, storage);
          std::vector<Values> before;
          std::vector<std::vector<float>> weight;
          for (const Parameters& p : parameters) {
            before.push_back(p.values());
            weight.push_back(p.read_weights());
          }
          const TestMatrix rows(random_floats(shape.n_tokens * width, 2, 0.05f), shape.n_tokens, width, type);
          const Gradients expected = backward64(shape, sparse, weight, rows.values());
          const DeviceArray<float> activation_gradient(sparse.capacity());
          const DeviceArray<double> norm_first(sparse.n_keys()), norm(sparse.n_keys());
          AdamStep adam = test_step();
          const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});

          decode_backward_norm(execution, sparse.csr(), sparse.csc(), rows.view(), views(parameters),
                               activation_gradient.array(), norm_first.array(),
                               workspace_of(execution, shape, sparse).array(), {}, {});
          const std::vector<float> da_first = used(activation_gradient, sparse);
          const std::vector<double> norms_first = norm_first.values();
          for (std::size_t s = 0; s < parameters.size(); ++s) CHECK(parameters[s].values().weight == before[s].weight);

          decode_backward_update(execution, sparse.csr(), sparse.csc(), rows.view(), views(parameters), step.data(),
                                 activation_gradient.array(), norm.array(),
                                 workspace_of(execution, shape, sparse).array(), {}, {}, {});
          // da belongs to the weights before the update: the norm pass, which leaves them alone, gives the same bits.
          const std::vector<float> da = used(activation_gradient, sparse);
          CHECK(da == da_first);
          for (std::size_t e = 0; e < da.size(); ++e)
            // A dot product over the strip in fp32, in any order: at most (columns + 1) roundings on the magnitudes.
            REQUIRE(std::abs(da[e] - expected.activation.value[e]) <=
                    (width + 1) * kRoundoff * expected.activation.magnitude[e]);

          // Squares are summed in fp64, by the CUDA stream in fp32: at most 128 columns per lane and then a tree.
          const double sum_roundings = execution.backend == Backend::cuda ? 140 * kRoundoff : 1e-14;
          const double most_hits = most_entries(sparse.offsets);
          const std::vector<double> norms = norm.values();
          for (std::int64_t s = 0; s < shape.n_layers; ++s) {
            const std::int64_t columns = shape.targets(s) * shape.d_model;
            std::vector<double> error(shape.n_features * columns);
            for (std::size_t i = 0; i < error.size(); ++i)
              error[i] = (most_hits + 1) * kRoundoff * expected.weight[s].magnitude[i];
            CHECK(agrees_with_adam(parameters[s], before[s], expected.weight[s].value, error, adam));
            for (std::int64_t f = 0; f < shape.n_features; ++f) {
              double square = 0, square_error = 0;
              for (std::int64_t i = f * columns; i < (f + 1) * columns; ++i) {
                const double g = expected.weight[s].value[i];
                square += g * g;
                square_error += 2 * std::abs(g) * error[i] + error[i] * error[i];
              }
              // Squares of fp32 gradients: the gradients' errors, and one rounding of the scaling.
              const std::int64_t key = s * shape.n_features + f;
              REQUIRE(std::abs(norms_first[key] - square) <= square_error * 1.001 + sum_roundings * square);
              const double scale = static_cast<double>(adam.gradient_scale) * adam.gradient_scale;
              REQUIRE(std::abs(norms[key] - scale * square) <=
                      scale * (square_error * 1.001 + (3 * kRoundoff + sum_roundings) * square));
            }
          }
        }
  });
}

TEST_CASE("the norm-only pass gives the update's norms, bit for bit, when nothing is scaled") {
  for_each_backend([&](const kernels::Execution& execution) {
    const Shape& shape = kShapes[3];
    const std::int64_t width = shape.n_layers * shape.d_model;
    const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
    const std::vector<Parameters> parameters = decoders(execution.backend, shape, StorageType::fp32);
    const TestMatrix rows(random_floats(shape.n_tokens * width, 2, 0.05f), shape.n_tokens, width, Scalar::fp32);
    const DeviceArray<float> activation_gradient(sparse.capacity());
    const DeviceArray<double> first(sparse.n_keys()), second(sparse.n_keys());
    AdamStep adam = test_step();
    adam.gradient_scale = 1.0f;
    const DeviceArray<AdamStep> step(std::vector<AdamStep>{adam});
    decode_backward_norm(execution, sparse.csr(), sparse.csc(), rows.view(), views(parameters),
                         activation_gradient.array(), first.array(), workspace_of(execution, shape, sparse).array(), {},
                         {});
    decode_backward_update(execution, sparse.csr(), sparse.csc(), rows.view(), views(parameters), step.data(),
                           activation_gradient.array(), second.array(), workspace_of(execution, shape, sparse).array(),
                           {}, {}, {});
    CHECK(first.values() == second.values());
  });
}

TEST_CASE("an explicit gradient and adam_rows give the bits of the fused update, on every storage") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies) {
        const std::int64_t width = shape.n_layers * shape.d_model;
        const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
        const std::vector<Parameters> fused = decoders(execution.backend, shape, storage),
                                      apart = decoders(execution.backend, shape, storage);
        // The scalar CUDA kernels of the two leave the contraction of multiply-adds to the compiler.
        if (execution.backend == Backend::cuda && shape.d_model % 8 != 0) continue;
        const TestMatrix rows(random_floats(shape.n_tokens * width, 2, 0.05f), shape.n_tokens, width, Scalar::bf16);
        const DeviceArray<float> activation_gradient(sparse.capacity());
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
        decode_backward_update(execution, sparse.csr(), sparse.csc(), rows.view(), views(fused), step.data(),
                               activation_gradient.array(), {}, workspace_of(execution, shape, sparse).array(), {}, {},
                               {});
        const std::vector<Parameters> gradients = explicit_gradients(execution, shape, sparse, rows);
        for (std::int64_t s = 0; s < shape.n_layers; ++s) {
          // In two pieces.
          const std::int64_t cut = shape.n_features / 2;
          const Matrix<const float> gradient = first_moment(gradients[s]);
          const auto update = [&](std::int64_t begin, std::int64_t end) {
            if (begin < end)
              adam_rows(execution, apart[s].view(), begin,
                        {gradient.row(begin), end - begin, gradient.columns, gradient.stride}, step.data());
          };
          update(0, cut);
          update(cut, shape.n_features);
          CHECK((fused[s].bits() == apart[s].bits()));
        }
      }
  });
}

TEST_CASE("noise in the fused update is that of add_noise on an explicit gradient, on every storage") {
  const NoiseKey key{1, 2, 3, 4, 5, 6, 7, 8};
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies)
        for (const Scalar type : {Scalar::bf16, Scalar::fp32}) {
          CAPTURE(shape.d_model);
          const std::int64_t width = shape.n_layers * shape.d_model;
          const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
          const std::vector<Parameters> fused = decoders(execution.backend, shape, storage),
                                        apart = decoders(execution.backend, shape, storage);
          const TestMatrix rows(random_floats(shape.n_tokens * width, 2, 0.05f), shape.n_tokens, width, type);
          const DeviceArray<float> activation_gradient(sparse.capacity());
          // Of fp32 state the first moments are the gradients.
          const DeviceArray<AdamStep> step(std::vector<AdamStep>{gradient_step()});
          const RowNoise noise{
              .stream = noise_stream(key, 3, 2), .stride = 3, .deviation = 0.25, .unit = nullptr, .scale = 0.5};
          decode_backward_noisy(execution, sparse.csr(), sparse.csc(), rows.view(), views(fused), step.data(),
                                activation_gradient.array(), {}, workspace_of(execution, shape, sparse).array(), {},
                                noise);
          const std::vector<Parameters> gradients = explicit_gradients(execution, shape, sparse, rows);
          for (std::int64_t s = 0; s < shape.n_layers; ++s) {
            const Matrix<const float> gradient = first_moment(gradients[s]);
            const std::uint64_t parameter = static_cast<std::uint64_t>(2 + 3 * s);
            add_noise(execution, {const_cast<float*>(gradient.data), gradient.rows * gradient.columns}, 0.25,
                      noise_stream(key, 3, parameter), 0, 0.5);
            adam_rows(execution, apart[s].view(), 0, gradient, step.data());
            if (execution.backend == Backend::portable) {
              CHECK((fused[s].bits() == apart[s].bits()));
            } else if (storage == StorageType::fp32) {  // compilers of GPUs contract products and sums as they like
              const std::vector<float> found = fused[s].values().first_moment,
                                       expected = apart[s].values().first_moment;
              for (std::size_t i = 0; i < found.size(); ++i)
                REQUIRE(std::abs(found[i] - expected[i]) <= 1e-6f * (1 + std::abs(expected[i])));
            }
          }
        }
  });
}

TEST_CASE("factors of rows add their weights to the gradient, and the update leaves the norms of the new rows") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Shape& shape : kShapes)
      for (const StorageType storage : kPolicies)
        for (const Scalar type : {Scalar::bf16, Scalar::fp32}) {
          CAPTURE(shape.d_model);
          CAPTURE(shape.cross_layer);
          CAPTURE(static_cast<int>(storage));
          const std::int64_t width = shape.n_layers * shape.d_model, n_keys = shape.n_layers * shape.n_features;
          const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
          const TestMatrix rows(random_floats(shape.n_tokens * width, 2, 0.05f), shape.n_tokens, width, type);
          const std::vector<float> factor = random_floats(n_keys, 3);
          const DeviceArray<float> factors(factor), activation_gradient(sparse.capacity()), left(n_keys),
              formed(n_keys);
          const DeviceArray<double> squared_norm(n_keys);
          const DeviceArray<std::byte> workspace(std::vector<std::byte>(
              static_cast<std::size_t>(decode_backward_workspace(execution.backend, shape.n_layers, shape.n_features,
                                                                 shape.d_model, sparse.capacity(), true)),
              std::byte{0x5a}));
          const auto update = [&](const std::vector<Parameters>& parameters, const AdamStep& constants) {
            const DeviceArray<AdamStep> step(std::vector<AdamStep>{constants});
            decode_backward_update(execution, sparse.csr(), sparse.csc(), rows.view(), views(parameters), step.data(),
                                   activation_gradient.array(), squared_norm.array(), workspace.array(), {},
                                   factors.array(), left.array());
          };
          const std::vector<Parameters> parameters = decoders(execution.backend, shape, storage);
          update(parameters, test_step());
          decoder_norms(execution, views(parameters), formed.array());
          CHECK(left.values() == formed.values());
          const std::vector<float> norms = left.values();
          for (std::int64_t s = 0; s < shape.n_layers; ++s) {
            const std::vector<float> weight = parameters[s].values().weight;
            const std::int64_t columns = shape.targets(s) * shape.d_model;
            for (std::int64_t f = 0; f < shape.n_features; ++f) {
              double sum = 0;
              for (std::int64_t i = f * columns; i < (f + 1) * columns; ++i)
                sum += static_cast<double>(weight[i]) * weight[i];
              // Squares in fp32 in at most 9216 / 32 + 5 + 40 * 9 additions, in practice few.
              REQUIRE(norms[s * shape.n_features + f] == doctest::Approx(std::sqrt(sum)).epsilon(1e-5));
            }
          }
          // A step that is withheld changes neither the weights nor their norms.
          AdamStep withheld = test_step();
          withheld.withheld = 1;
          update(parameters, withheld);
          CHECK(left.values() == norms);

          if (storage != StorageType::fp32) continue;
          const std::vector<Parameters> gradients = decoders(execution.backend, shape, storage),
                                        before = explicit_gradients(execution, shape, sparse, rows),
                                        untouched = decoders(execution.backend, shape, storage);
          update(gradients, gradient_step());
          for (std::int64_t s = 0; s < shape.n_layers; ++s) {
            const std::vector<float> weight = untouched[s].read_weights();
            const std::vector<float> with = gradients[s].values().first_moment,
                                     without = before[s].values().first_moment;
            const std::int64_t columns = shape.targets(s) * shape.d_model;
            for (std::int64_t i = 0; i < std::ssize(weight); ++i) {
              const float term = factor[s * shape.n_features + i / columns] * weight[i];
              // Two roundings of fp32 at most apart, of the term and of the sum.
              REQUIRE(std::abs(with[i] - without[i] - term) <= 0x1p-22f * (std::abs(term) + std::abs(without[i])));
            }
          }
        }
  });
}

TEST_CASE("the update gives the same bits again, also when the rows of the first targets arrive late") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const int which : {3, 6, 7, 9})
      for (const StorageType storage : kPolicies) {
        const Shape& shape = kShapes[which];
        CAPTURE(shape.d_model);
        CAPTURE(static_cast<int>(storage));
        const std::int64_t width = shape.n_layers * shape.d_model, late_columns = shape.n_layers / 2 * shape.d_model;
        const Sparse sparse = random_sparse(shape.n_tokens, shape.n_layers, shape.n_features, shape.density, 1);
        const std::vector<Parameters> first = decoders(execution.backend, shape, storage),
                                      again = decoders(execution.backend, shape, storage);
        const std::vector<float> values = random_floats(shape.n_tokens * width, 2, 0.05f);
        std::vector<float> incomplete = values;
        for (std::int64_t i = 0; i < std::ssize(incomplete); ++i)
          if (i % width < late_columns) incomplete[i] = std::nanf("");
        const TestMatrix rows(values, shape.n_tokens, width, Scalar::bf16),
            arriving(incomplete, shape.n_tokens, width, Scalar::bf16);
        const DeviceArray<float> da_first(sparse.capacity()), da_again(sparse.capacity());
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});
        decode_backward_update(execution, sparse.csr(), sparse.csc(), rows.view(), views(first), step.data(),
                               da_first.array(), {}, workspace_of(execution, shape, sparse).array(), {}, {}, {});
        decode_backward_update(execution, sparse.csr(), sparse.csc(), arriving.view(), views(again), step.data(),
                               da_again.array(), {}, workspace_of(execution, shape, sparse).array(),
                               {shape.n_layers / 2,
                                [&] {
                                  copy_rows(execution, rows.view().columns_from(0, late_columns),
                                            arriving.view().columns_from(0, late_columns));
                                }},
                               {}, {});
        CHECK(used(da_first, sparse) == used(da_again, sparse));
        for (std::size_t s = 0; s < first.size(); ++s) CHECK((first[s].bits() == again[s].bits()));
      }
  });
}

#ifndef WEFT_ENABLE_CUDA
TEST_CASE("the dense formulation computes the same step") {
  for_each_backend([&](const kernels::Execution& execution) {
    const Shape shape{23, 3, 50, 33, 0.1};
    const std::int64_t width = shape.n_layers * shape.d_model, n = shape.n_tokens, f = shape.n_features;
    const Sparse sparse = random_sparse(n, shape.n_layers, f, shape.density, 4);
    const std::vector<Parameters> parameters = decoders(execution.backend, shape, StorageType::fp32);
    std::vector<DeviceArray<float>> activations, weights;
    std::vector<Matrix<const float>> activation_views, weight_views;
    for (std::int64_t s = 0; s < shape.n_layers; ++s) {
      activations.emplace_back(n * f);
      weights.emplace_back(parameters[s].values().weight);
      scatter_activations(execution, sparse.csr(), sparse.device_value.array(), s, activations.back().matrix(n, f));
      activation_views.push_back(activations.back().matrix(n, f));
      weight_views.push_back(weights.back().matrix(f, (shape.n_layers - s) * shape.d_model));
    }
    // Two fp32 sums of the same terms in different order: within roundings of their magnitude, all of which are below
    // 20 here.
    const double tolerance = 50 * kRoundoff * 20;
    const auto agree = [&](const std::vector<float>& a, const std::vector<float>& b) {
      REQUIRE(a.size() == b.size());
      for (std::size_t i = 0; i < a.size(); ++i) REQUIRE(std::abs(a[i] - b[i]) <= tolerance);
    };
    const DeviceArray<float> dense_y(std::vector<float>(n * width, 5.0f));
    dense_decode(execution, activation_views, weight_views, dense_y.matrix(n, width));
    const TestMatrix y(std::vector<float>(n * width), n, width, Scalar::fp32);
    decode_forward(execution, sparse.csr(), 0, n, views(parameters), 0, y.view());
    agree(dense_y.values(), y.values());

    const TestMatrix rows(random_floats(n * width, 2, 0.05f), n, width, Scalar::fp32);
    const Matrix<const float> row_view{static_cast<const float*>(rows.view().data), n, width, width};
    const DeviceArray<float> activation_gradient(sparse.capacity());
    decode_backward_norm(execution, sparse.csr(), sparse.csc(), rows.view(), views(parameters),
                         activation_gradient.array(), {}, workspace_of(execution, shape, sparse).array(), {}, {});
    const std::vector<float> da = used(activation_gradient, sparse);
    const std::vector<Parameters> gradients = explicit_gradients(execution, shape, sparse, rows);
    for (std::int64_t s = 0; s < shape.n_layers; ++s) {
      const std::int64_t columns = (shape.n_layers - s) * shape.d_model;
      const DeviceArray<float> dense_dw(f * columns), dense_da(n * f), dense_de(f * shape.d_model);
      dense_decoder_gradient(execution, activation_views[s], row_view, dense_dw.matrix(f, columns));
      agree(dense_dw.values(), gradients[s].values().first_moment);
      dense_activation_gradient(execution, weight_views[s], row_view, dense_da.matrix(n, f));
      const std::vector<float> all = dense_da.values();
      for (std::int64_t token = 0; token < n; ++token)
        for (std::int64_t e = sparse.row_offsets[token]; e < sparse.row_offsets[token + 1]; ++e)
          if (sparse.key[e] / f == s) REQUIRE(std::abs(da[e] - all[token * f + sparse.key[e] % f]) <= tolerance);
      // The encoder's product has the decoder gradient's form with the inputs in place of the gradient rows.
      const Matrix<const float> x{row_view.data, n, shape.d_model, width};
      dense_encoder_gradient(execution, activation_views[s], x, dense_de.matrix(f, shape.d_model));
      const DeviceArray<float> again(f * shape.d_model);
      dense_decoder_gradient(execution, activation_views[s], x, again.matrix(f, shape.d_model));
      CHECK(dense_de.values() == again.values());
    }
  });
}
#endif

}  // namespace weft::testing

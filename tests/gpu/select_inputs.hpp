// SPDX-License-Identifier: Apache-2.0
//
// Inputs of the selection on a device, and the rows that it must give: a full sort by the rule
// (kernels/transcoder/select/selection_rule.hpp).
#pragma once

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bf16.hpp"
#include "kernels/transcoder/select/select.hpp"
#include "kernels/transcoder/select/select_cuda.hpp"

namespace weft::testing {

using namespace kernels;

using cuda::DeviceSelection;
using cuda::SelectionFailure;
using cuda::SelectionRequest;

inline void cuda_ok(cudaError_t status) { REQUIRE_MESSAGE(status == cudaSuccess, cudaGetErrorString(status)); }

/// Device memory of one test.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::int64_t n) : size_(n) {
    cuda_ok(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(n, 1)) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& from) : Buffer(static_cast<std::int64_t>(from.size())) { put(from); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  void put(const std::vector<T>& from) {
    cuda_ok(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> read(std::int64_t n) const {
    std::vector<T> to(static_cast<std::size_t>(n));
    cuda_ok(cudaMemcpy(to.data(), data_, to.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
  /// Complete on return: the streams of the tests do not wait for the default stream.
  void poison() {
    cuda_ok(cudaMemset(data_, 0xa5, static_cast<std::size_t>(size_) * sizeof(T)));
    cuda_ok(cudaStreamSynchronize(nullptr));
  }
  T* data() const { return data_; }
  Array<T> array() const { return {data_, size_}; }

 private:
  T* data_ = nullptr;
  std::int64_t size_;
};

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() { cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream); }
  Execution execution() const { return {Backend::cuda, stream}; }
};

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  float normal() {
    float sum = 0;
    for (int i = 0; i < 6; ++i) sum += uniform();
    return (sum - 3.0f) * 1.41421356f;
  }
};

struct Sizes {
  std::int64_t tokens, layers, features;
};

/// Products [layer][token][feature] as stored (rounded to the type), and biases.
struct Input {
  std::string name;
  std::vector<float> product;
  std::vector<std::vector<float>> bias;
  std::vector<std::vector<float>> cut = {};  // relu: of each layer, or of none
};

inline Input make_input(const std::string& name, const Sizes& sizes, Scalar type, std::uint64_t seed) {
  Random random{seed};
  Input input{name, std::vector<float>(static_cast<std::size_t>(sizes.layers * sizes.tokens * sizes.features)), {}};
  const float infinity = std::numeric_limits<float>::infinity();
  for (std::int64_t l = 0; l < sizes.layers; ++l) {
    std::vector<float> bias(static_cast<std::size_t>(sizes.features), 0.0f);
    if (name == "random" || name == "one token" || name == "few positive")
      for (float& b : bias) b = 0.3f * random.normal();
    if (name == "all negative")
      for (float& b : bias) b = -20.0f;
    input.bias.push_back(bias);
  }
  std::size_t i = 0;
  for (std::int64_t l = 0; l < sizes.layers; ++l)
    for (std::int64_t n = 0; n < sizes.tokens; ++n)
      for (std::int64_t f = 0; f < sizes.features; ++f, ++i) {
        float value = random.normal();
        if (name == "planted ties") value = static_cast<float>(random.next() % 5) * 0.5f - 1.0f;
        if (name == "ties at the top") value = random.next() % 50 == 0 ? 2.0f : std::fmin(value, 1.9f);
        if (name == "one token" && n != sizes.tokens / 2) value = -std::fabs(value) - 9.0f;
        if (name == "one feature" && f != sizes.features / 3) value = -std::fabs(value);
        if (name == "one feature" && f == sizes.features / 3) value = std::fabs(value) + 0.125f;
        if (name == "all equal") value = 1.5f;
        if (name == "few positive") value = random.next() % 997 == 0 ? 5.0f + value : -5.0f;
        if (name == "all negative") value = -std::fabs(value);
        if (name == "extreme") {
          const float odd[] = {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 1e-40f, -1e-40f, 0.0f,
                               -0.0f,    3.0e38f};
          value = random.next() % 3 == 0 ? odd[random.next() % 8] : value * 1e-38f;
        }
        if (type == Scalar::bf16) value = static_cast<float>(to_bf16(value));
        input.product[i] = value;
      }
  return input;
}

struct Csr {
  std::vector<std::int64_t> offsets;
  std::vector<std::uint32_t> key;
  std::vector<float> value;
};

/// The rule as a full sort: all positive entries of a group in order, cut at the budget; with cuts all above their cut.
inline Csr expected_selection(const SelectionRequest& request, const Sizes& sizes, const Input& input) {
  struct Entry {
    std::uint32_t key;
    std::int64_t token;
    std::uint32_t index;
    std::int64_t group;
  };
  const bool topk = request.rule == SelectionRule::topk;
  const std::int64_t layer_groups = request.all_layers || request.rule == SelectionRule::relu ? 1 : sizes.layers;
  const std::int64_t n_groups = topk ? layer_groups * sizes.tokens : layer_groups;
  std::vector<std::vector<Entry>> groups(static_cast<std::size_t>(n_groups));
  std::size_t i = 0;
  for (std::int64_t l = 0; l < sizes.layers; ++l)
    for (std::int64_t n = 0; n < sizes.tokens; ++n)
      for (std::int64_t f = 0; f < sizes.features; ++f, ++i) {
        const float r = input.product[i] + input.bias[static_cast<std::size_t>(l)][static_cast<std::size_t>(f)];
        std::uint32_t key = selection_key(r);
        if (!input.cut.empty())
          key = r > input.cut[static_cast<std::size_t>(l)][static_cast<std::size_t>(f)] ? float_bits(r) : 0;
        if (key == 0) continue;
        const std::int64_t layer_group = layer_groups == 1 ? 0 : l;
        const std::int64_t g = topk ? n * layer_groups + layer_group : layer_group;
        groups[static_cast<std::size_t>(g)].push_back({key, n, static_cast<std::uint32_t>(l * sizes.features + f), g});
      }
  std::vector<Entry> kept;
  for (auto& group : groups) {
    const auto better = [](const Entry& a, const Entry& b) {
      if (a.key != b.key) return a.key > b.key;
      if (a.token != b.token) return a.token < b.token;
      return a.index < b.index;
    };
    const auto budget = static_cast<std::size_t>(request.budget);
    if (request.rule != SelectionRule::relu && group.size() > budget) {
      std::nth_element(group.begin(), group.begin() + static_cast<std::ptrdiff_t>(budget), group.end(), better);
      group.resize(budget);
    }
    kept.insert(kept.end(), group.begin(), group.end());
  }
  std::sort(kept.begin(), kept.end(),
            [](const Entry& a, const Entry& b) { return a.token != b.token ? a.token < b.token : a.index < b.index; });
  Csr csr;
  csr.offsets.assign(static_cast<std::size_t>(sizes.tokens + 1), 0);
  for (const Entry& entry : kept) {
    ++csr.offsets[static_cast<std::size_t>(entry.token + 1)];
    csr.key.push_back(entry.index);
    csr.value.push_back(bits_float(entry.key));
  }
  for (std::size_t n = 1; n < csr.offsets.size(); ++n) csr.offsets[n] += csr.offsets[n - 1];
  return csr;
}

/// Products of a test on the device, copied tile by tile.
class Products {
 public:
  Products(const Input& input, const Sizes& sizes, Scalar type)
      : sizes_(sizes), type_(type), data_(static_cast<std::int64_t>(input.product.size()) * bytes_of(type)) {
    std::vector<std::byte> bytes(input.product.size() * static_cast<std::size_t>(bytes_of(type)));
    for (std::size_t i = 0; i < input.product.size(); ++i)
      if (type == Scalar::bf16) {
        const bf16 value = to_bf16(input.product[i]);
        std::memcpy(bytes.data() + 2 * i, &value, 2);
      } else {
        std::memcpy(bytes.data() + 4 * i, &input.product[i], 4);
      }
    data_.put(bytes);
  }
  /// For a rank with this first token and feature.
  DeviceSelection::Producer producer(std::int64_t first_token = 0, std::int64_t first_feature = 0) const {
    return [=, this](const Execution& execution, const TileRange& range, AnyMatrix out) {
      const std::int64_t element = bytes_of(type_);
      const std::byte* from =
          data_.data() + ((range.layer * sizes_.tokens + first_token + range.token_begin) * sizes_.features +
                          first_feature + range.feature_begin) *
                             element;
      cuda_ok(cudaMemcpy2DAsync(out.data, static_cast<std::size_t>(out.stride * element), from,
                                static_cast<std::size_t>(sizes_.features * element),
                                static_cast<std::size_t>(range.feature_count * element),
                                static_cast<std::size_t>(range.token_count), cudaMemcpyDeviceToDevice,
                                static_cast<cudaStream_t>(execution.stream)));
    };
  }

 private:
  Sizes sizes_;
  Scalar type_;
  Buffer<std::byte> data_;
};

/// Rows and weights whose products are `input`: integers, so that sums are exact in any order. For the kernel that
/// filters products as it forms them (Hopper only; elsewhere the copied products are used).
struct Factors {
  Input input;
  Buffer<bf16> x, weight;
  std::vector<AnyMatrix> of_layer;
  EncoderOperands operands;

  Factors(const std::string& name, const Sizes& sizes, std::int64_t d, std::uint64_t seed)
      : Factors(name, sizes, d, seed, std::vector<bf16>(static_cast<std::size_t>(sizes.tokens * sizes.layers * d)),
                std::vector<bf16>(static_cast<std::size_t>(sizes.layers * sizes.features * d))) {}

 private:
  Factors(const std::string& name, const Sizes& sizes, std::int64_t d, std::uint64_t seed, std::vector<bf16> rows,
          std::vector<bf16> weights)
      : input(make(name, sizes, d, seed, rows, weights)), x(rows), weight(weights) {
    for (std::int64_t l = 0; l < sizes.layers; ++l)
      of_layer.push_back({weight.data() + l * sizes.features * d, Scalar::bf16, sizes.features, d, d});
    operands = {{x.data(), Scalar::bf16, sizes.tokens, sizes.layers * d, sizes.layers * d},
                of_layer,
                parts_of(sizes.tokens, sizes.layers),
                [](const Execution&, std::int64_t) {}};
  }

 public:
  /// Parts that arrive one after the other: the first layer in three parts of the tokens, then two layers at a time.
  static std::function<EncoderOperands::Part(const Execution&, std::size_t)> parts_of(std::int64_t tokens,
                                                                                      std::int64_t layers) {
    std::vector<EncoderOperands::Part> parts;
    const std::int64_t first = tokens / 3, second = tokens / 2 + 1;
    for (const auto& [begin, end] : {std::pair{first, second}, {std::int64_t{0}, first}, {second, tokens}})
      if (begin < end) parts.push_back({0, 1, begin, end - begin});
    for (std::int64_t layer = 1; layer < layers; layer += 2)
      parts.push_back({layer, std::min(layer + 2, layers), 0, tokens});
    return [parts](const Execution&, std::size_t i) { return i < parts.size() ? parts[i] : EncoderOperands::Part{}; };
  }

 private:
  static Input make(const std::string& name, const Sizes& sizes, std::int64_t d, std::uint64_t seed,
                    std::vector<bf16>& rows, std::vector<bf16>& weights) {
    Random random{seed};
    const bool ties = name == "ties", equal = name == "all equal";
    const auto draw = [&](int most) {
      return static_cast<float>(static_cast<int>(random.next() % static_cast<unsigned>(2 * most + 1)) - most);
    };
    for (bf16& value : rows) value = to_bf16(equal ? 1.0f : draw(ties ? 1 : 31));
    for (bf16& value : weights)
      value = to_bf16(equal ? 1.0f : ties ? (random.next() % 16 == 0 ? 1.0f : 0.0f) : draw(31));
    // A few tokens with many times more entries than the others: more than the lists of the kernel's threads hold.
    if (name == "dense rows") {
      for (std::size_t j = 0; j < rows.size(); ++j)
        if (static_cast<std::int64_t>(j) / (sizes.layers * d) % 64 < 9)
          rows[j] = to_bf16(static_cast<std::int64_t>(j) % d == 0 ? 8192.0f : 0.0f);
      for (std::size_t j = 0; j < weights.size(); j += static_cast<std::size_t>(d))
        weights[j] = to_bf16(1.0f + static_cast<float>(j / static_cast<std::size_t>(d) % 31));
    }
    if (name == "extreme")
      for (bf16& value : rows)
        if (random.next() % 997 == 0)
          value = to_bf16(random.next() % 2 == 0 ? std::numeric_limits<float>::infinity()
                                                 : std::numeric_limits<float>::quiet_NaN());
    Input input{name, std::vector<float>(static_cast<std::size_t>(sizes.layers * sizes.tokens * sizes.features)), {}};
    std::size_t i = 0;
    for (std::int64_t l = 0; l < sizes.layers; ++l) {
      input.bias.emplace_back(static_cast<std::size_t>(sizes.features), 0.0f);
      if (!ties && !equal)
        for (float& b : input.bias.back()) b = 300.0f * random.normal();
      for (std::int64_t n = 0; n < sizes.tokens; ++n)
        for (std::int64_t f = 0; f < sizes.features; ++f, ++i) {
          const bf16* const a = rows.data() + (n * sizes.layers + l) * d;
          const bf16* const b = weights.data() + (l * sizes.features + f) * d;
          float sum = 0;
          for (std::int64_t j = 0; j < d; ++j) sum += static_cast<float>(a[j]) * static_cast<float>(b[j]);
          input.product[i] = static_cast<float>(to_bf16(sum));
        }
    }
    return input;
  }
};

}  // namespace weft::testing

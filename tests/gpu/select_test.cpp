// SPDX-License-Identifier: Apache-2.0
//
// What is specific to the GPU in the selection and its dense product: results from a CUDA graph with its loop, any
// workspace contents and thresholds, wide rows, lists that overflow, and the ranks of a grid as threads on one GPU. The
// expected rows are a full sort by the rule (kernels/transcoder/select/rule.hpp), bit for bit; the product is compared
// with float64. The cases that both drivers share are in tests/transcoder/selection/selection_test.cpp.
//
// Needs a GPU; exits with 77 (skipped) without one.
#define DOCTEST_CONFIG_IMPLEMENT
#include "kernels/transcoder/select/select.hpp"

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/bf16.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/transcoder/select/select_cuda.hpp"

namespace {

using namespace weft::kernels;
using cuda::DeviceSelection;
using cuda::SelectionFailure;
using cuda::SelectionRequest;
using cuda::TileRange;

void cuda_ok(cudaError_t status) { REQUIRE_MESSAGE(status == cudaSuccess, cudaGetErrorString(status)); }

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

Input make_input(const std::string& name, const Sizes& sizes, Scalar type, std::uint64_t seed) {
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
Csr expected_selection(const SelectionRequest& request, const Sizes& sizes, const Input& input) {
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

struct Output {
  Buffer<std::int64_t> offsets;
  Buffer<std::uint32_t> key;
  Buffer<float> value;
  SparseActivations activations;

  Output(const Sizes& sizes, std::int64_t capacity)
      : offsets(sizes.tokens + 1), key(capacity), value(capacity), activations{sizes.tokens,   sizes.layers,
                                                                               sizes.features, offsets.array(),
                                                                               key.array(),    value.array()} {}
  void poison() {
    offsets.poison();
    key.poison();
    value.poison();
  }
};

/// Checks that the device's rows are the expected ones, bit for bit.
void check_rows(const Output& output, const Csr& expected) {
  const auto offsets = output.offsets.read(static_cast<std::int64_t>(expected.offsets.size()));
  REQUIRE(offsets == expected.offsets);
  const auto n = static_cast<std::int64_t>(expected.key.size());
  if (n == 0) return;
  CHECK(output.key.read(n) == expected.key);
  const auto value = output.value.read(n);
  CHECK(std::memcmp(value.data(), expected.value.data(), value.size() * sizeof(float)) == 0);
}

/// The GPUs that filter products as they form them.
bool is_hopper() {
  int major = 0, minor = 0;
  cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  cuda_ok(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return major == 9 && minor == 0;
}

/// One request on one input: eager and captured, with thresholds that are unknown, zero, from the batch before, and
/// random.
void check_selection(const SelectionRequest& request, const Sizes& sizes, const Input& input,
                     const EncoderOperands* operands = nullptr) {
  CAPTURE(input.name);
  CAPTURE(static_cast<int>(request.rule));
  CAPTURE(request.all_layers);
  CAPTURE(sizes.tokens);
  CAPTURE(sizes.features);
  CAPTURE(request.tile_features);
  CAPTURE(request.budget);
  const Csr expected = expected_selection(request, sizes, input);
  const Stream stream;
  const Execution execution = stream.execution();
  const Products products(input, sizes, request.product);
  std::vector<float> of_features;
  for (const auto* vectors : {&input.bias, &input.cut})
    for (const auto& vector : *vectors) of_features.insert(of_features.end(), vector.begin(), vector.end());
  const Buffer<float> feature_buffer(of_features);
  std::vector<Array<const float>> bias, cut;
  for (std::int64_t l = 0; l < sizes.layers; ++l) {
    bias.push_back({feature_buffer.data() + l * sizes.features, sizes.features});
    if (!input.cut.empty())
      cut.push_back({feature_buffer.data() + (sizes.layers + l) * sizes.features, sizes.features});
  }
  Buffer<std::byte> workspace(DeviceSelection::workspace_bytes(request));
  workspace.poison();
  DeviceSelection selection(request, workspace.array(), execution);
  Output output(sizes, std::max<std::int64_t>(static_cast<std::int64_t>(expected.key.size()), 1));
  Random random{99};
  const Array<std::uint32_t> thresholds = selection.thresholds();
  const auto randomise = [&](int run) {
    cuda_ok(cudaStreamSynchronize(stream.stream));
    std::vector<std::uint32_t> state(static_cast<std::size_t>(thresholds.size));
    for (auto& threshold : state) {
      const float near = expected.value.empty() ? 1.0f : expected.value[random.next() % expected.value.size()];
      threshold = run == 2   ? 0u
                  : run == 3 ? static_cast<std::uint32_t>(random.next())
                  : run == 4 ? float_bits(near)
                             : float_bits(near * (0.2f + random.uniform()));
    }
    cuda_ok(cudaMemcpy(thresholds.data, state.data(), state.size() * 4, cudaMemcpyHostToDevice));
  };
  for (int run = 0; run < 6; ++run) {  // 0: as constructed; 1: thresholds of the run before
    CAPTURE(run);
    if (run > 1) randomise(run);
    output.poison();
    selection.select(execution, sizes.tokens, request.budget, bias, products.producer(), output.activations, nullptr,
                     cut, operands);
    cuda_ok(cudaStreamSynchronize(stream.stream));
    check_rows(output, expected);
    CHECK(selection.report(execution).passes <= 7);
    CHECK(selection.forms_products() == (operands != nullptr && is_hopper() && request.rule != SelectionRule::topk));
  }
  if (std::getenv("WEFT_TEST_WITHOUT_GRAPHS") != nullptr) return;  // racecheck does not support a graph's loop
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeRelaxed));
  selection.select(execution, sizes.tokens, request.budget, bias, products.producer(), output.activations, nullptr, cut,
                   operands);
  cuda_ok(cudaStreamEndCapture(stream.stream, &graph));
  cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
  for (int run = 1; run < 6; ++run) {
    CAPTURE(run);
    if (run > 1) randomise(run);
    output.poison();
    cuda_ok(cudaDeviceSynchronize());
    cuda_ok(cudaGraphLaunch(ready, stream.stream));
    cuda_ok(cudaStreamSynchronize(stream.stream));
    check_rows(output, expected);
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
}

const std::vector<std::string> kInputs = {"random",      "planted ties", "ties at the top", "all negative", "one token",
                                          "one feature", "all equal",    "few positive",    "extreme"};

SelectionRequest request_of(SelectionRule rule, bool all_layers, const Sizes& sizes, double k, Scalar product) {
  SelectionRequest request;
  request.rule = rule;
  request.all_layers = all_layers;
  request.n_tokens = sizes.tokens;
  request.n_layers = sizes.layers;
  request.n_features = sizes.features;
  const double per_group = rule == SelectionRule::topk ? 1.0 : static_cast<double>(sizes.tokens);
  request.budget =
      std::max<std::int64_t>(1, std::llround(k * per_group * (all_layers ? static_cast<double>(sizes.layers) : 1.0)));
  if (rule == SelectionRule::relu) request.budget = sizes.tokens * sizes.layers * sizes.features;
  request.product = product;
  return request;
}

TEST_CASE("small: every rule, scope and input in one pass; run by compute-sanitizer") {
  const Sizes sizes{9, 2, 770};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs) {
      const Input input = make_input(name, sizes, product, 17);
      for (const SelectionRule rule : {SelectionRule::batch_topk, SelectionRule::topk, SelectionRule::relu})
        for (const bool all_layers : {true, false}) {
          if (rule == SelectionRule::relu && !all_layers) continue;
          SelectionRequest request = request_of(rule, all_layers, sizes, 12.5, product);
          request.tile_tokens = 5;
          request.tile_features = 384;
          check_selection(request, sizes, input);
        }
    }
}

/// relu where products are filtered as they are formed, with cuts or with biases of the same effect. Few entries, but
/// in one layer all tokens of some features: more than the lists of the kernel's threads hold.
void check_few_above(const Sizes& sizes, std::int64_t d, bool with_cuts) {
  Factors factors("random", sizes, d, 31);
  Random random{5};
  for (std::int64_t l = 0; l < sizes.layers; ++l) {
    std::vector<float> cut;
    for (std::int64_t f = 0; f < sizes.features; ++f)
      cut.push_back(l == 0 && f < 50 ? -1e6f : 14000.0f * (1 + random.uniform()));
    if (with_cuts)
      factors.input.cut.push_back(cut);
    else
      for (std::size_t f = 0; f < cut.size(); ++f) factors.input.bias[static_cast<std::size_t>(l)][f] = -cut[f];
  }
  SelectionRequest request = request_of(SelectionRule::relu, true, sizes, 0, Scalar::bf16);
  request.budget /= 32;
  check_selection(request, sizes, factors.input, &factors.operands);
}

TEST_CASE("small: products that are filtered as they are formed; run by compute-sanitizer") {
  // Two tiles of features, one cluster with a block without tokens; one tie fills all batches of a tile.
  const Sizes sizes{70, 2, 260};
  for (const char* name : {"random", "all equal"}) {
    const Factors factors(name, sizes, 200, 31);
    SelectionRequest request = request_of(SelectionRule::batch_topk, false, sizes, 5.3, Scalar::bf16);
    check_selection(request, sizes, factors.input, &factors.operands);
  }
  check_few_above({70, 3, 601}, 200, true);
}

TEST_CASE("small: products of which the largest keys are known; run by compute-sanitizer") {
  const Sizes sizes{70, 2, 260};
  const Factors factors("random", sizes, 200, 31);
  check_selection(request_of(SelectionRule::topk, false, sizes, 2, Scalar::bf16), sizes, factors.input,
                  &factors.operands);
}

TEST_CASE("batch_topk equals a full sort for any input and any threshold of the filter") {
  const Sizes sizes{257, 3, 1000};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs) {
      const Input input = make_input(name, sizes, product, 7);
      for (const bool all_layers : {true, false}) {
        SelectionRequest request = request_of(SelectionRule::batch_topk, all_layers, sizes, 16, product);
        check_selection(request, sizes, input);
        // In tiles of rows and columns.
        request.tile_tokens = 100;
        request.tile_features = 384;
        check_selection(request, sizes, input);
      }
    }
}

TEST_CASE("batch_topk: sizes that are not round, from one entry to wide rows") {
  // 2, 4 and 8 warps share a wide row.
  for (const Sizes& sizes :
       {Sizes{1, 1, 1}, {1, 3, 770}, {5, 2, 7}, {33, 2, 5003}, {19, 2, 10001}, {17, 2, 20001}, {2, 40, 33}})
    for (const Scalar product : {Scalar::bf16, Scalar::fp32})
      for (const char* name : {"random", "planted ties", "one token"}) {
        const Input input = make_input(name, sizes, product, 11);
        for (const bool all_layers : {true, false})
          check_selection(request_of(SelectionRule::batch_topk, all_layers, sizes, 12.5, product), sizes, input);
      }
}

TEST_CASE("batch_topk equals a full sort where products are filtered as they are formed") {
  // Sizes: ends of tiles in every direction, more layers than a launch takes, tiles of a repeated pass with several
  // segments.
  struct Case {
    Sizes sizes;
    std::int64_t d, tile_features;
  };
  for (const Case& each : {Case{{300, 2, 1000}, 328, 512}, Case{{1, 2, 256}, 256, 0}, Case{{65, 34, 257}, 200, 0},
                           Case{{260, 1, 2052}, 384, 0}})
    for (const char* name : {"random", "ties", "all equal", "dense rows", "extreme"}) {
      const Factors factors(name, each.sizes, each.d, 31);
      for (const bool all_layers : {false, true}) {
        SelectionRequest request = request_of(SelectionRule::batch_topk, all_layers, each.sizes, 5.3, Scalar::bf16);
        request.tile_features = each.tile_features;
        check_selection(request, each.sizes, factors.input, &factors.operands);
      }
    }
}

TEST_CASE("batch_topk: 4097 tokens, and lists that overflow with ties") {
  const Sizes sizes{4097, 2, 770};
  for (const char* name : {"random", "planted ties", "all equal"}) {
    const Input input = make_input(name, sizes, Scalar::bf16, 3);
    for (const bool all_layers : {true, false})
      check_selection(request_of(SelectionRule::batch_topk, all_layers, sizes, 16, Scalar::bf16), sizes, input);
  }
}

TEST_CASE("a producer that does not repeat its bits: nothing is written outside the lists, and the fault is reported") {
  // All products equal, and larger ones from some pass on. In the pass that admits counted ties, all of them pass.
  const Sizes sizes{4097, 2, 770};
  const SelectionRequest request = request_of(SelectionRule::batch_topk, false, sizes, 16, Scalar::bf16);
  const Buffer<float> bias_buffer(std::vector<float>(static_cast<std::size_t>(sizes.layers * sizes.features), 0.0f));
  std::vector<Array<const float>> bias;
  for (std::int64_t l = 0; l < sizes.layers; ++l)
    bias.push_back({bias_buffer.data() + l * sizes.features, sizes.features});
  constexpr std::int64_t kMargin = 1 << 20;  // bytes after the workspace
  bool overflowed = false;
  for (std::int64_t change = 1; change < 8; ++change) {
    CAPTURE(change);
    const Stream stream;
    const Execution execution = stream.execution();
    const std::int64_t bytes = DeviceSelection::workspace_bytes(request);
    Buffer<std::byte> workspace(bytes + kMargin);
    workspace.poison();
    DeviceSelection selection(request, workspace.array(), execution);
    Output output(sizes, request.budget * sizes.layers);
    std::int64_t calls = 0;
    const auto produce = [&](const Execution& on, const TileRange& range, AnyMatrix out) {
      const bool changed = calls++ / sizes.layers >= change;  // one tile per layer
      cuda_ok(cudaMemsetAsync(out.data, changed ? 0x40 : 0x3f,
                              static_cast<std::size_t>(range.token_count * out.stride * 2),
                              static_cast<cudaStream_t>(on.stream)));
    };
    const Buffer<std::int32_t> fault(std::vector<std::int32_t>{0});
    selection.select(execution, sizes.tokens, request.budget, bias, produce, output.activations, fault.data());
    const SelectionFailure failure = selection.first_failure(execution);
    CHECK((fault.read(1)[0] != 0) == (failure.kind != SelectionFailure::none));
    if (failure.kind == SelectionFailure::overflow) {
      overflowed = true;
      CHECK(failure.group < sizes.layers);
      CHECK(failure.entries > failure.capacity);
      CHECK(selection.report(execution).overflow);
    }
    const std::vector<std::byte> all = workspace.read(bytes + kMargin);
    CHECK(std::all_of(all.begin() + bytes, all.end(), [&](std::byte b) { return b == all.back(); }));
    // A later selection is valid again, and the first failure stays known.
    calls = 0;
    const std::int64_t never = 1000;
    change = change + never;
    selection.select(execution, sizes.tokens, request.budget, bias, produce, output.activations);
    change = change - never;
    CHECK(!selection.report(execution).overflow);
    CHECK(selection.first_failure(execution).kind == failure.kind);
  }
  CHECK(overflowed);
}

TEST_CASE("topk keeps the best of each token") {
  // The widest rows have more chunks than a block keeps the largest key of.
  for (const Sizes& sizes : {Sizes{257, 3, 1000}, {1, 1, 1}, {9, 2, 20001}, {3, 2, 40001}})
    for (const Scalar product : {Scalar::bf16, Scalar::fp32})
      for (const std::string& name : kInputs) {
        if (sizes.tokens != 257 && name != "random" && (name != "planted ties" || sizes.tokens == 3)) continue;
        const Input input = make_input(name, sizes, product, 5);
        for (const double k : {1.0, 16.0, 300.0})
          for (const bool all_layers : {true, false}) {
            SelectionRequest request = request_of(SelectionRule::topk, all_layers, sizes, k, product);
            check_selection(request, sizes, input);
            request.tile_tokens = 100;
            check_selection(request, sizes, input);
            request.tile_features = 384;
            check_selection(request, sizes, input);
          }
      }
}

TEST_CASE("topk where the kernel that forms the products finds the largest keys of a row's parts") {
  struct Case {
    Sizes sizes;
    std::int64_t d, tile_tokens;
  };
  for (const Case& each : {Case{{300, 2, 1000}, 328, 100}, Case{{1, 2, 256}, 256, 0}, Case{{65, 3, 257}, 200, 0},
                           Case{{70, 2, 9003}, 384, 0}})
    for (const char* name : {"random", "ties", "all equal", "dense rows", "extreme"}) {
      const Factors factors(name, each.sizes, each.d, 31);
      for (const double k : {2.0, 30.0})
        for (const bool all_layers : {false, true}) {
          SelectionRequest request = request_of(SelectionRule::topk, all_layers, each.sizes, k, Scalar::bf16);
          request.tile_tokens = each.tile_tokens;
          check_selection(request, each.sizes, factors.input, &factors.operands);
        }
    }
}

TEST_CASE("topk from the tiles of another selection, which may compute them several times; layers without any entry") {
  const Sizes sizes{257, 3, 1000};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::int64_t tile_features : {0, 384})
      for (const double k : {16.0, 300.0}) {
        CAPTURE(tile_features);
        CAPTURE(k);
        const Input input = make_input("random", sizes, product, 5);
        Input masked = input;  // one layer has no entry, the others have some features
        for (std::int64_t l = 0; l < sizes.layers; ++l)
          for (std::int64_t f = 0; f < sizes.features; ++f)
            if (l == 1 || f % 7 != l) masked.bias[l][f] = -std::numeric_limits<float>::infinity();
        SelectionRequest lead = request_of(SelectionRule::batch_topk, false, sizes, 16, product);
        lead.tile_tokens = 100;
        lead.tile_features = tile_features;
        SelectionRequest request = request_of(SelectionRule::topk, false, sizes, k, product);
        request.tile_tokens = lead.tile_tokens;
        request.tile_features = tile_features;
        request.follows = true;
        const Csr expected = expected_selection(request, sizes, masked),
                  expected_of_lead = expected_selection(lead, sizes, input);
        const Stream stream;
        const Execution execution = stream.execution();
        const Products products(input, sizes, product);
        const auto on_device = [&](const Input& of) {
          std::vector<float> all;
          for (const auto& bias : of.bias) all.insert(all.end(), bias.begin(), bias.end());
          return Buffer<float>(all);
        };
        const Buffer<float> bias_buffer = on_device(input), masked_buffer = on_device(masked);
        std::vector<Array<const float>> bias, masked_bias;
        for (std::int64_t l = 0; l < sizes.layers; ++l) {
          bias.push_back({bias_buffer.data() + l * sizes.features, sizes.features});
          masked_bias.push_back({masked_buffer.data() + l * sizes.features, sizes.features});
        }
        Buffer<std::byte> lead_workspace(DeviceSelection::workspace_bytes(lead)),
            workspace(DeviceSelection::workspace_bytes(request));
        lead_workspace.poison();
        workspace.poison();
        DeviceSelection leader(lead, lead_workspace.array(), execution),
            follower(request, workspace.array(), execution);
        Output lead_output(sizes, static_cast<std::int64_t>(expected_of_lead.key.size())),
            output(sizes, static_cast<std::int64_t>(expected.key.size()));
        const auto produce = products.producer();
        const auto select = [&] {
          follower.begin(execution, sizes.tokens, request.budget, masked_bias);
          leader.select(
              execution, sizes.tokens, lead.budget, bias,
              [&](const Execution& where, const TileRange& range, AnyMatrix out) {
                produce(where, range, out);
                follower.take(where, range, out);
              },
              lead_output.activations);
          follower.finish(execution, output.activations);
        };
        const auto check = [&] {
          cuda_ok(cudaStreamSynchronize(stream.stream));
          check_rows(output, expected);
          check_rows(lead_output, expected_of_lead);
        };
        for (int run = 0; run < 2; ++run) {  // the leader's first run takes several passes
          output.poison();
          select();
          check();
        }
        if (std::getenv("WEFT_TEST_WITHOUT_GRAPHS") != nullptr) continue;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        cuda_ok(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeRelaxed));
        select();
        cuda_ok(cudaStreamEndCapture(stream.stream, &graph));
        cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
        const Array<std::uint32_t> thresholds = leader.thresholds();
        for (int run = 0; run < 2; ++run) {
          if (run == 1)  // nothing passes: the loop computes the tiles again
            cuda_ok(cudaMemset(thresholds.data, 0xff, static_cast<std::size_t>(thresholds.size) * 4));
          output.poison();
          cuda_ok(cudaDeviceSynchronize());
          cuda_ok(cudaGraphLaunch(ready, stream.stream));
          check();
        }
        cudaGraphExecDestroy(ready);
        cudaGraphDestroy(graph);
      }
}

TEST_CASE("topk: more entries per token than a block compares at once") {
  const Sizes sizes{6, 3, 20001};
  const Input input = make_input("random", sizes, Scalar::fp32, 5);
  for (const double k : {700.0, 2600.0})
    for (const bool all_layers : {true, false})
      check_selection(request_of(SelectionRule::topk, all_layers, sizes, k, Scalar::fp32), sizes, input);
}

TEST_CASE("relu keeps everything positive") {
  const Sizes sizes{257, 3, 1000};
  for (const Scalar product : {Scalar::bf16, Scalar::fp32})
    for (const std::string& name : kInputs)
      check_selection(request_of(SelectionRule::relu, true, sizes, 0, product), sizes,
                      make_input(name, sizes, product, 13));
}

TEST_CASE("relu and thresholds of features where products are filtered as they are formed") {
  for (const auto& [sizes, d] : {std::pair{Sizes{300, 2, 1000}, 328}, {Sizes{65, 34, 260}, 200}})
    for (const bool with_cuts : {false, true}) {
      CAPTURE(with_cuts);
      check_few_above(sizes, d, with_cuts);
    }
}

// ---- the ranks of a grid, on one GPU -------------------------------------------------------------------------------

/// Ranks as threads, of which one runs at a time; each has its own stream. An exchange is a barrier of the threads,
/// after which each stream waits for the others on the device, so that it can be captured.
class Ranks {
 public:
  explicit Ranks(int n, std::shared_ptr<std::mutex> turn = std::make_shared<std::mutex>())
      : pointer_(static_cast<std::size_t>(n)), arrived_(static_cast<std::size_t>(n)), turn_(std::move(turn)) {
    for (cudaEvent_t& event : arrived_) cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  Ranks(const Ranks&) = delete;
  ~Ranks() {
    for (cudaEvent_t event : arrived_) cudaEventDestroy(event);
  }

  /// n ranks that take turns with these.
  std::unique_ptr<Ranks> group(int n) const { return std::make_unique<Ranks>(n, turn_); }

  /// body(rank) on every rank.
  void run(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(arrived_.size()); ++rank)
      threads.emplace_back([&, rank] {
        const std::lock_guard turn(*turn_);
        body(rank);
      });
    for (std::thread& thread : threads) thread.join();
  }

  /// Called by every rank with its stream and memory; act(memory of all ranks) enqueues its copies from them.
  void exchange(int rank, cudaStream_t stream, const void* own,
                const std::function<void(const std::vector<const void*>&)>& act) {
    pointer_[static_cast<std::size_t>(rank)] = own;
    barrier(rank, stream);
    act(pointer_);
    barrier(rank, stream);  // memory may change after all have read it
  }

 private:
  void barrier(int rank, cudaStream_t stream) {
    cuda_ok(cudaEventRecord(arrived_[static_cast<std::size_t>(rank)], stream));
    wait_for_all();
    for (cudaEvent_t event : arrived_) cuda_ok(cudaStreamWaitEvent(stream, event, 0));
    wait_for_all();  // before an event is recorded again
  }
  void wait_for_all() {
    std::unique_lock turn(*turn_, std::adopt_lock);
    if (++n_waiting_ == arrived_.size()) {
      n_waiting_ = 0;
      ++generation_;
      all_here_.notify_all();
    } else {
      all_here_.wait(turn, [this, now = generation_] { return generation_ != now; });
    }
    turn.release();  // still locked by `run`
  }

  std::vector<const void*> pointer_;
  std::vector<cudaEvent_t> arrived_;
  std::shared_ptr<std::mutex> turn_;  // held by the rank that runs
  std::condition_variable all_here_;
  std::size_t n_waiting_ = 0;
  std::uint64_t generation_ = 0;
};

/// One rank of the test.
struct Rank {
  Rank(const SelectionRequest& request, const Sizes& own, const Csr& result, const cuda::SelectionExchange& exchange)
      : workspace(DeviceSelection::workspace_bytes(request)),
        expected(result),
        output(own, std::max<std::int64_t>(static_cast<std::int64_t>(result.key.size()), 1)),
        features(own.features) {
    workspace.poison();
    selection = std::make_unique<DeviceSelection>(request, workspace.array(), stream.execution(), exchange);
    cuda_ok(cudaStreamSynchronize(stream.stream));
  }
  Stream stream;
  Buffer<std::byte> workspace;
  Csr expected;
  Output output;
  std::int64_t features;
  std::unique_ptr<DeviceSelection> selection;
  std::int64_t first_token = 0, first_feature = 0, n_tokens = 0;
};

/// A sum for one rank: the values of all ranks in page-locked memory, which a graph may use again.
struct Sum {
  explicit Sum(std::int64_t n_ranks, std::int64_t n_values) : n(n_values), ranks(n_ranks) {
    cuda_ok(cudaMallocHost(&values, static_cast<std::size_t>((ranks + 1) * n) * sizeof(std::int64_t)));
  }
  Sum(const Sum&) = delete;
  ~Sum() { cudaFreeHost(values); }
  static void form(void* sum) {
    const auto& self = *static_cast<Sum*>(sum);
    for (std::int64_t i = 0; i < self.n; ++i) {
      std::int64_t total = 0;
      for (std::int64_t r = 0; r < self.ranks; ++r) total += self.values[r * self.n + i];
      self.values[self.ranks * self.n + i] = total;
    }
  }
  std::int64_t* values = nullptr;  // [ranks + 1, n]: the last row is the sum
  std::int64_t n, ranks;
};

/// One request on one input, on a grid of data x feature ranks. operands: of the whole input.
void check_on_grid(const SelectionRequest& whole, const Sizes& sizes, const Input& input, int n_data, int n_feature,
                   const EncoderOperands* operands = nullptr) {
  CAPTURE(input.name);
  CAPTURE(static_cast<int>(whole.rule));
  CAPTURE(whole.all_layers);
  CAPTURE(sizes.tokens);
  CAPTURE(whole.budget);
  CAPTURE(n_data);
  CAPTURE(n_feature);
  const int n_ranks = n_data * n_feature;
  const Csr expected = expected_selection(whole, sizes, input);
  const Products products(input, sizes, whole.product);
  std::vector<float> all_bias;
  for (const auto& bias : input.bias) all_bias.insert(all_bias.end(), bias.begin(), bias.end());
  const Buffer<float> bias_buffer(all_bias);
  const auto part = [](std::int64_t n, std::int64_t parts, std::int64_t i) { return i * n / parts; };

  Ranks world(n_ranks);
  std::vector<std::unique_ptr<Ranks>> axis;  // feature axis of each slice of the batch
  std::vector<std::unique_ptr<Sum>> sums;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < n_ranks; ++r) {
    const std::int64_t d = r / n_feature, f = r % n_feature;
    const std::int64_t token_begin = part(sizes.tokens, n_data, d), token_end = part(sizes.tokens, n_data, d + 1);
    const std::int64_t begin = part(sizes.features, n_feature, f), end = part(sizes.features, n_feature, f + 1);
    SelectionRequest request = whole;
    request.n_tokens = (sizes.tokens + n_data - 1) / n_data;
    request.n_features = end - begin;
    request.position = {n_feature, f, n_data, d, begin, sizes.features};
    Csr own;
    own.offsets.push_back(0);
    for (std::int64_t n = token_begin; n < token_end; ++n) {
      for (auto i = static_cast<std::size_t>(expected.offsets[static_cast<std::size_t>(n)]);
           i < static_cast<std::size_t>(expected.offsets[static_cast<std::size_t>(n + 1)]); ++i) {
        const std::int64_t layer = expected.key[i] / sizes.features, feature = expected.key[i] % sizes.features;
        if (feature < begin || feature >= end) continue;
        own.key.push_back(static_cast<std::uint32_t>(layer * (end - begin) + feature - begin));
        own.value.push_back(expected.value[i]);
      }
      own.offsets.push_back(static_cast<std::int64_t>(own.key.size()));
    }
    if (f == 0) axis.push_back(world.group(n_feature));
    Ranks& shards = *axis.back();
    cuda::SelectionExchange exchange;
    exchange.sum = [&world, &sums, r, n_ranks](const Execution& execution, Array<std::int64_t> values) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      const std::size_t bytes = static_cast<std::size_t>(values.size) * sizeof(std::int64_t);
      sums.push_back(std::make_unique<Sum>(n_ranks, values.size));
      Sum* sum = sums.back().get();
      world.exchange(r, stream, values.data, [&](const std::vector<const void*>& all) {
        for (std::size_t i = 0; i < all.size(); ++i)
          cuda_ok(cudaMemcpyAsync(sum->values + static_cast<std::int64_t>(i) * sum->n, all[i], bytes,
                                  cudaMemcpyDeviceToHost, stream));
      });
      cuda_ok(cudaLaunchHostFunc(stream, Sum::form, sum));
      cuda_ok(cudaMemcpyAsync(values.data, sum->values + sum->ranks * sum->n, bytes, cudaMemcpyHostToDevice, stream));
    };
    exchange.all_gather = [&shards, f](const Execution& execution, void* data, std::span<const std::int64_t> bytes) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      shards.exchange(static_cast<int>(f), stream, data, [&](const std::vector<const void*>& all) {
        std::int64_t begin_of_piece = 0;
        for (std::size_t i = 0; i < all.size(); begin_of_piece += bytes[i++])
          if (static_cast<std::int64_t>(i) != f && bytes[i] > 0)
            cuda_ok(cudaMemcpyAsync(static_cast<std::byte*>(data) + begin_of_piece,
                                    static_cast<const std::byte*>(all[i]) + begin_of_piece,
                                    static_cast<std::size_t>(bytes[i]), cudaMemcpyDeviceToDevice, stream));
      });
    };
    exchange.all_gather_if = [&shards, f](const Execution& execution, const std::uint32_t* needed,
                                          Array<std::uint32_t> data) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      // What is not needed is left out, so that a wrong flag shows; a recorded exchange takes place in any case.
      cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
      std::uint32_t takes_place = 1;
      cuda_ok(cudaStreamIsCapturing(stream, &recording));
      if (recording == cudaStreamCaptureStatusNone) {
        cuda_ok(cudaMemcpyAsync(&takes_place, needed, sizeof takes_place, cudaMemcpyDeviceToHost, stream));
        cuda_ok(cudaStreamSynchronize(stream));
      }
      shards.exchange(static_cast<int>(f), stream, data.data, [&](const std::vector<const void*>& all) {
        const std::int64_t piece = data.size / static_cast<std::int64_t>(all.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::int64_t begin = static_cast<std::int64_t>(i) * piece;
          if (static_cast<std::int64_t>(i) != f && piece > 0 && takes_place != 0)
            cuda_ok(cudaMemcpyAsync(data.data + begin, static_cast<const std::uint32_t*>(all[i]) + begin,
                                    static_cast<std::size_t>(piece) * 4, cudaMemcpyDeviceToDevice, stream));
        }
      });
    };
    exchange.all_to_all = [&shards, f](const Execution& execution, const void* send,
                                       std::span<const std::int64_t> send_bytes, void* receive,
                                       std::span<const std::int64_t> receive_bytes) {
      const auto stream = static_cast<cudaStream_t>(execution.stream);
      shards.exchange(static_cast<int>(f), stream, send, [&](const std::vector<const void*>& all) {
        std::int64_t from = 0, to = 0;  // pieces for rank f begin at the same place on every rank
        for (std::int64_t i = 0; i < f; ++i) from += send_bytes[static_cast<std::size_t>(i)];
        for (std::size_t i = 0; i < all.size(); to += receive_bytes[i++])
          if (receive_bytes[i] > 0)
            cuda_ok(cudaMemcpyAsync(static_cast<std::byte*>(receive) + to, static_cast<const std::byte*>(all[i]) + from,
                                    static_cast<std::size_t>(receive_bytes[i]), cudaMemcpyDeviceToDevice, stream));
      });
    };
    ranks.push_back(
        std::make_unique<Rank>(request, Sizes{token_end - token_begin, sizes.layers, end - begin}, own, exchange));
    ranks.back()->first_token = token_begin;
    ranks.back()->first_feature = begin;
    ranks.back()->n_tokens = token_end - token_begin;
  }

  const auto select = [&](int r) {
    Rank& rank = *ranks[static_cast<std::size_t>(r)];
    std::vector<Array<const float>> bias;
    for (std::int64_t l = 0; l < sizes.layers; ++l)
      bias.push_back({bias_buffer.data() + l * sizes.features + rank.first_feature, rank.features});
    EncoderOperands own;
    std::vector<AnyMatrix> weight;
    if (operands != nullptr) {
      for (const AnyMatrix& all : operands->weight) weight.push_back(all.rows_from(rank.first_feature, rank.features));
      own = {operands->x.rows_from(rank.first_token, rank.n_tokens), weight,
             Factors::parts_of(rank.n_tokens, sizes.layers), operands->arrive_layer};
    }
    rank.selection->select(rank.stream.execution(), rank.n_tokens, whole.budget, bias,
                           products.producer(rank.first_token, rank.first_feature), rank.output.activations, nullptr,
                           {}, operands != nullptr ? &own : nullptr);
  };
  Random random{99};
  // 0: as constructed; 1: of the run before; 2: zero; 3: random, different on each rank; 4: too high on one rank; 5:
  // about right, the same on all ranks; 6: at or just below a K-th value.
  const auto set_thresholds = [&](int run) {
    const auto near = [&] {
      return expected.value.empty() ? 1.0f : expected.value[random.next() % expected.value.size()];
    };
    const Array<std::uint32_t> first = ranks[0]->selection->thresholds();
    std::vector<std::uint32_t> same(static_cast<std::size_t>(first.size));
    for (auto& threshold : same)
      threshold = run == 2   ? 0u
                  : run == 6 ? float_bits(near()) - static_cast<std::uint32_t>(random.next() % 2)
                             : float_bits(near() * (0.2f + random.uniform()));
    for (int r = 0; r < n_ranks; ++r) {
      std::vector<std::uint32_t> state = same;
      if (run == 3)
        for (auto& threshold : state) threshold = static_cast<std::uint32_t>(random.next());
      if (run == 4 && r == n_ranks - 1)
        for (auto& threshold : state) threshold = 0x7f800000u;
      cuda_ok(cudaMemcpy(ranks[static_cast<std::size_t>(r)]->selection->thresholds().data, state.data(),
                         state.size() * 4, cudaMemcpyHostToDevice));
    }
  };
  const auto check_all = [&](int run) {
    CAPTURE(run);
    std::vector<std::uint32_t> next;
    std::int64_t ties_cut = 0;
    for (int r = 0; r < n_ranks; ++r) {
      CAPTURE(r);
      Rank& rank = *ranks[static_cast<std::size_t>(r)];
      check_rows(rank.output, rank.expected);
      const cuda::SelectionReport report = rank.selection->report(rank.stream.execution());
      CHECK(report.passes <= 7);
      if (whole.rule != SelectionRule::batch_topk) continue;
      const Array<std::uint32_t> state = rank.selection->thresholds();
      std::vector<std::uint32_t> own(static_cast<std::size_t>(state.size));
      cuda_ok(cudaMemcpy(own.data(), state.data, own.size() * 4, cudaMemcpyDeviceToHost));
      if (r == 0) next = own, ties_cut = report.ties_cut;
      CHECK(own == next);
      CHECK(report.ties_cut == ties_cut);
    }
  };
  const auto poison = [&] {
    for (const auto& rank : ranks) rank->output.poison();
    cuda_ok(cudaDeviceSynchronize());
  };
  for (int run = 0; run < 7; ++run) {
    if (run > 1) set_thresholds(run);
    poison();
    world.run(select);
    cuda_ok(cudaDeviceSynchronize());
    sums.clear();
    check_all(run);
  }
  if (std::getenv("WEFT_TEST_WITHOUT_GRAPHS") != nullptr) return;
  // All ranks in one graph: one branch each, joined by the exchanges.
  const Stream origin;
  cudaEvent_t event = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  cuda_ok(cudaStreamBeginCapture(origin.stream, cudaStreamCaptureModeRelaxed));
  cuda_ok(cudaEventRecord(event, origin.stream));
  for (const auto& rank : ranks) cuda_ok(cudaStreamWaitEvent(rank->stream.stream, event, 0));
  world.run(select);
  for (const auto& rank : ranks) {
    cuda_ok(cudaEventRecord(event, rank->stream.stream));
    cuda_ok(cudaStreamWaitEvent(origin.stream, event, 0));
  }
  cuda_ok(cudaStreamEndCapture(origin.stream, &graph));
  cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
  for (int run = 1; run < 7; ++run) {
    if (run > 1) set_thresholds(run);
    poison();
    cuda_ok(cudaGraphLaunch(ready, origin.stream));
    cuda_ok(cudaStreamSynchronize(origin.stream));
    check_all(run);
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaEventDestroy(event);
}

/// Inputs whose selected entries are on one rank, and ties across ranks.
Input grid_input(const std::string& name, const Sizes& sizes, Scalar type) {
  Input input = make_input(name == "one rank" || name == "one rank, ties" ? "random" : name, sizes, type, 23);
  if (name == "one rank" || name == "one rank, ties") {
    input.name = name;
    std::size_t i = 0;
    for (std::int64_t l = 0; l < sizes.layers; ++l)
      for (std::int64_t n = 0; n < sizes.tokens; ++n)
        for (std::int64_t f = 0; f < sizes.features; ++f, ++i)
          if (n < sizes.tokens / 5 && f >= sizes.features * 4 / 5) {
            input.product[i] = name == "one rank" ? input.product[i] + 16.0f : 16.0f;
            if (type == Scalar::bf16) input.product[i] = static_cast<float>(to_bf16(input.product[i]));
          }
    if (name == "one rank, ties")
      for (auto& bias : input.bias) std::fill(bias.begin(), bias.end(), 0.0f);
  }
  return input;
}

TEST_CASE("a grid of ranks selects what one rank selects, for any input and thresholds") {
  const Sizes sizes{37, 3, 201};  // nothing divides by 2, 3 or 4
  for (const auto& [data, feature] : {std::pair{1, 2}, {2, 1}, {1, 4}, {4, 1}, {2, 2}, {3, 2}})
    for (const char* name : {"random", "planted ties", "ties at the top", "all equal", "one rank", "one rank, ties",
                             "one token", "one feature", "few positive", "all negative", "extreme"}) {
      const Input input = grid_input(name, sizes, Scalar::fp32);
      for (const SelectionRule rule : {SelectionRule::batch_topk, SelectionRule::topk, SelectionRule::relu})
        for (const bool all_layers : {true, false}) {
          if (rule == SelectionRule::relu && !all_layers) continue;
          SelectionRequest request = request_of(rule, all_layers, sizes, 16 + 2.0 / 3, Scalar::fp32);
          request.tile_tokens = 11;
          request.tile_features = 64;
          check_on_grid(request, sizes, input, data, feature);
        }
    }
}

TEST_CASE("a grid of ranks that filter products as they are formed") {
  const Sizes sizes{130, 2, 1000};
  for (const char* name : {"random", "ties", "all equal"}) {
    const Factors factors(name, sizes, 256, 7);
    for (const auto& [data, feature] : {std::pair{1, 2}, {3, 1}, {2, 2}})
      for (const bool all_layers : {true, false})
        check_on_grid(request_of(SelectionRule::batch_topk, all_layers, sizes, 16, Scalar::bf16), sizes, factors.input,
                      data, feature, &factors.operands);
  }
}

TEST_CASE("a grid of ranks whose lists overflow") {
  // 2 x 2 ranks, each with a million entries and a list of at most 115,000.
  const Sizes sizes{1025, 2, 2049};
  for (const char* name : {"random", "planted ties", "all equal", "one rank, ties"}) {
    const Input input = grid_input(name, sizes, Scalar::bf16);
    for (const bool all_layers : {true, false})
      check_on_grid(request_of(SelectionRule::batch_topk, all_layers, sizes, 16, Scalar::bf16), sizes, input, 2, 2);
  }
}

TEST_CASE("a grid of more ranks than features or tokens") {
  for (const Sizes& sizes : {Sizes{1, 2, 50}, {3, 2, 1}, {1, 1, 1}, {40, 2, 3}})
    for (const auto& [data, feature] : {std::pair{1, 4}, {4, 1}, {2, 2}})
      for (const SelectionRule rule : {SelectionRule::batch_topk, SelectionRule::topk, SelectionRule::relu})
        for (const char* name : {"random", "all equal"})
          check_on_grid(request_of(rule, true, sizes, 1.5, Scalar::fp32), sizes, grid_input(name, sizes, Scalar::fp32),
                        data, feature);
}

/// Compared with float64 products of the stored values.
struct GemmCase {
  std::int64_t n, f, d, input_stride, weight_stride, product_stride, alignment;
};

TEST_CASE("the dense product agrees with float64, in fp32 and bf16, captured or not") {
  const Stream stream;
  const Execution execution = stream.execution();
  for (const GemmCase& c :
       {GemmCase{67, 1000, 768, 768, 768, 1000, 16}, {1, 8, 16, 48, 16, 8, 16}, {129, 520, 770, 2310, 770, 520, 4}})
    for (const auto& [in, out] :
         {std::pair{Scalar::fp32, Scalar::fp32}, {Scalar::bf16, Scalar::bf16}, {Scalar::bf16, Scalar::fp32}}) {
      CAPTURE(c.n);
      CAPTURE(static_cast<int>(in));
      CAPTURE(static_cast<int>(out));
      Random random{21};
      const auto fill = [&](std::int64_t n) {
        std::vector<float> values(static_cast<std::size_t>(n));
        for (float& value : values) {
          value = random.normal();
          if (in == Scalar::bf16) value = static_cast<float>(to_bf16(value));
        }
        return values;
      };
      const auto stored = [&](const std::vector<float>& values) {
        std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(bytes_of(in)));
        for (std::size_t i = 0; i < values.size(); ++i)
          if (in == Scalar::bf16) {
            const bf16 value = to_bf16(values[i]);
            std::memcpy(bytes.data() + 2 * i, &value, 2);
          } else {
            std::memcpy(bytes.data() + 4 * i, &values[i], 4);
          }
        return bytes;
      };
      const std::vector<float> input = fill(c.n * c.input_stride), weight = fill(c.f * c.weight_stride);
      const Buffer<std::byte> input_buffer(stored(input)), weight_buffer(stored(weight));
      Buffer<std::byte> product(c.n * c.product_stride * bytes_of(out)), workspace(32 << 20);
      cuda::GemmShape shape{c.n, c.f, c.d, c.input_stride, c.weight_stride, c.product_stride, in, out, c.alignment};
      const cuda::Gemm first(shape, 32 << 20);
      // A record chooses the same algorithm again; one of another GPU is ignored.
      const cuda::Gemm gemm(shape, 32 << 20, &first.record());
      CHECK(gemm.record().algorithm == first.record().algorithm);
      cuda::GemmRecord foreign = first.record();
      foreign.gpu = "another";
      CHECK(cuda::Gemm(shape, 32 << 20, &foreign).record().gpu == cuda::gpu_name());

      product.poison();
      gemm.run(execution, input_buffer.data(), weight_buffer.data(), product.data(), workspace.array());
      cuda_ok(cudaStreamSynchronize(stream.stream));
      const auto once = product.read(c.n * c.product_stride * bytes_of(out));
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t ready = nullptr;
      product.poison();
      cuda_ok(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeRelaxed));
      gemm.run(execution, input_buffer.data(), weight_buffer.data(), product.data(), workspace.array());
      cuda_ok(cudaStreamEndCapture(stream.stream, &graph));
      cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
      cuda_ok(cudaGraphLaunch(ready, stream.stream));
      cuda_ok(cudaStreamSynchronize(stream.stream));
      CHECK(product.read(c.n * c.product_stride * bytes_of(out)) == once);
      cudaGraphExecDestroy(ready);
      cudaGraphDestroy(graph);

      double worst = 0;
      for (std::int64_t n = 0; n < c.n; ++n)
        for (std::int64_t f = 0; f < c.f; ++f) {
          double sum = 0, absolute = 0;
          for (std::int64_t i = 0; i < c.d; ++i) {
            const double term = static_cast<double>(input[static_cast<std::size_t>(n * c.input_stride + i)]) *
                                static_cast<double>(weight[static_cast<std::size_t>(f * c.weight_stride + i)]);
            sum += term;
            absolute += std::fabs(term);
          }
          const std::size_t at = static_cast<std::size_t>(n * c.product_stride + f);
          double got;
          if (out == Scalar::bf16) {
            bf16 value;
            std::memcpy(&value, once.data() + 2 * at, 2);
            got = static_cast<double>(static_cast<float>(value));
          } else {
            float value;
            std::memcpy(&value, once.data() + 4 * at, 4);
            got = static_cast<double>(value);
          }
          // d terms summed in fp32 (the tensor cores may truncate: 2^-22 per term), then one rounding to the stored
          // type.
          const double bound =
              static_cast<double>(c.d) * 0x1p-22 * absolute + (out == Scalar::bf16 ? 0x1p-8 : 0x1p-23) * std::fabs(sum);
          worst = std::max(worst, std::fabs(got - sum) / bound);
        }
      CHECK(worst <= 1.0);
    }
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  doctest::Context context(argc, argv);
  return context.run();
}

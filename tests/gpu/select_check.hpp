// SPDX-License-Identifier: Apache-2.0
//
// Requests to the selection on a device, and the check of its rows against a full sort.
#pragma once

#include <cstdlib>

#include "kernels/gpu_architecture.hpp"
#include "tests/gpu/select_inputs.hpp"

namespace weft::testing {

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
inline void check_rows(const Output& output, const Csr& expected) {
  const auto offsets = output.offsets.read(static_cast<std::int64_t>(expected.offsets.size()));
  REQUIRE(offsets == expected.offsets);
  const auto n = static_cast<std::int64_t>(expected.key.size());
  if (n == 0) return;
  CHECK(output.key.read(n) == expected.key);
  const auto value = output.value.read(n);
  CHECK(std::memcmp(value.data(), expected.value.data(), value.size() * sizeof(float)) == 0);
}

/// One request on one input: eager and captured, with thresholds that are unknown, zero, from the batch before, and
/// random.
inline void check_selection(const SelectionRequest& request, const Sizes& sizes, const Input& input,
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
    CHECK(selection.statistics(execution).passes <= 7);
    CHECK(selection.forms_products() ==
          (operands != nullptr && cuda::is_hopper() && request.rule != SelectionRule::topk));
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

inline const std::vector<std::string> kInputs = {"random",       "planted ties", "ties at the top",
                                                 "all negative", "one token",    "one feature",
                                                 "all equal",    "few positive", "extreme"};

inline SelectionRequest request_of(SelectionRule rule, bool all_layers, const Sizes& sizes, double k, Scalar product) {
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

}  // namespace weft::testing

// SPDX-License-Identifier: Apache-2.0
//
// What only a GPU has: the sparse half of a step recorded in a graph. Its replays must give the bits of eager calls.
// That the kernels are right is tested in tests/kernels/, on every backend. Exit 77 without a GPU.
#define DOCTEST_CONFIG_IMPLEMENT
#include "kernels/transcoder/sparse/sparse.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/metrics/metric_sums.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::testing {
namespace {

using namespace kernels;

constexpr std::int64_t kTokens = 600, kLayers = 3, kFeatures = 200, kKeys = kLayers * kFeatures;

float uniform(std::uint64_t stream, std::int64_t index) {
  return uniform_float(philox(stream, Purpose::test, 0, static_cast<std::uint64_t>(index)).word[0]);
}

std::vector<std::uint16_t> random_bf16(std::int64_t size, std::uint64_t stream, float scale) {
  std::vector<std::uint16_t> out;
  for (std::int64_t i = 0; i < size; ++i) out.push_back(to_bf16(scale * (2.0f * uniform(stream, i) - 1.0f)).bits);
  return out;
}

/// Parameters in bf16 with their moments, all layers one after the other.
struct Matrices {
  DeviceArray<std::uint16_t> weight, first, second;
  std::vector<ParameterRows> rows;

  Matrices(std::int64_t d_model, bool decoder) {
    std::int64_t size = 0;
    for (std::int64_t s = 0; s < kLayers; ++s) size += kFeatures * (decoder ? kLayers - s : 1) * d_model;
    const std::vector<std::uint16_t> zeros(static_cast<std::size_t>(size));
    weight = DeviceArray<std::uint16_t>(random_bf16(size, decoder ? 1 : 2, 0.05f));
    first = DeviceArray<std::uint16_t>(zeros);
    second = DeviceArray<std::uint16_t>(zeros);
    std::int64_t at = 0;
    for (std::int64_t s = 0; s < kLayers; ++s) {
      ParameterRows p;
      p.storage = StorageType::bf16;
      p.rows = kFeatures;
      p.columns = (decoder ? kLayers - s : 1) * d_model;
      p.segment = d_model;
      p.element_base = static_cast<std::uint64_t>(at);
      p.weight = weight.data() + at;
      p.first_moment = first.data() + at;
      p.second_moment = second.data() + at;
      rows.push_back(p);
      at += p.rows * p.columns;
    }
  }
  void append(std::vector<std::uint16_t>& bits) const {
    for (const DeviceArray<std::uint16_t>* array : {&weight, &first, &second}) {
      const std::vector<std::uint16_t> host = array->download();
      bits.insert(bits.end(), host.begin(), host.end());
    }
  }
};

/// Lists, parameters and buffers of a step: transpose, decode, loss, both backward passes, clocks.
struct Step {
  std::int64_t d;
  Execution execution;
  DeviceArray<std::int64_t> row_offsets, offsets, clocks;
  DeviceArray<std::uint32_t> key, token, position;
  DeviceArray<float> value, gradient, bias_state, centre, standardise;
  DeviceArray<std::uint16_t> x, target, y, gradient_rows;
  DeviceArray<double> sums;
  DeviceArray<AdamStep> adam;
  DeviceArray<std::byte> workspace;
  Matrices encoder, decoder;
  std::vector<ParameterVector> biases;

  Step(std::int64_t d_model, cudaStream_t stream)
      : d(d_model), execution{Backend::cuda, stream}, encoder(d_model, false), decoder(d_model, true) {
    std::vector<std::int64_t> rows{0};
    std::vector<std::uint32_t> keys;
    std::vector<float> values;
    for (std::int64_t n = 0; n < kTokens; ++n) {
      for (std::int64_t k = 0; k < kKeys; ++k)
        if (uniform(3, n * kKeys + k) < (k % kFeatures == 7 ? 0.9f : 0.03f)) {
          keys.push_back(static_cast<std::uint32_t>(k));
          values.push_back(0.1f + uniform(4, n * kKeys + k));
        }
      rows.push_back(static_cast<std::int64_t>(keys.size()));
    }
    const std::int64_t capacity = static_cast<std::int64_t>(keys.size()), width = kLayers * d;
    row_offsets = DeviceArray<std::int64_t>(rows);
    key = DeviceArray<std::uint32_t>(keys);
    value = DeviceArray<float>(values);
    offsets = DeviceArray<std::int64_t>(kKeys + 1);
    clocks = DeviceArray<std::int64_t>(std::vector<std::int64_t>(kKeys));
    token = DeviceArray<std::uint32_t>(capacity);
    position = DeviceArray<std::uint32_t>(capacity);
    gradient = DeviceArray<float>(capacity);
    bias_state = DeviceArray<float>(std::vector<float>(3 * kKeys));
    for (std::int64_t s = 0; s < kLayers; ++s) {
      const auto part = [&](std::int64_t which) {
        return Array<float>{bias_state.data() + which * kKeys + s * kFeatures, kFeatures};
      };
      biases.push_back({part(0), part(1), part(2)});
    }
    centre = DeviceArray<float>(std::vector<float>(static_cast<std::size_t>(width)));
    standardise = DeviceArray<float>(std::vector<float>(static_cast<std::size_t>(width), 1.0f));
    x = DeviceArray<std::uint16_t>(random_bf16(kTokens * width, 5, 1.0f));
    target = DeviceArray<std::uint16_t>(random_bf16(kTokens * width, 6, 1.0f));
    y = DeviceArray<std::uint16_t>(kTokens * width);
    gradient_rows = DeviceArray<std::uint16_t>(kTokens * width);
    sums = DeviceArray<double>(3 * kLayers);
    adam = DeviceArray<AdamStep>(
        std::vector<AdamStep>{{1e-3f, 0.9f, 0.999f, 0.1f, 0.001f, 1e-8f, 0.01f, 2.0f, 100.0f, 0.7f, 42, 7}});
    workspace = DeviceArray<std::byte>(
        std::max({transpose_workspace(Backend::cuda, kKeys, capacity), loss_workspace(kTokens, kLayers),
                  decode_backward_workspace(Backend::cuda, kLayers, kFeatures, d, capacity, false),
                  encode_backward_workspace(Backend::cuda, kLayers, kFeatures, d, capacity)}));
    workspace.poison();
  }

  void enqueue() const {
    const SparseActivations activations{kTokens, kLayers, kFeatures, row_offsets.array(), key.array(), value.array()};
    const FeatureHits hits{offsets.array(), token.array(), position.array()};
    const auto matrix = [&](const DeviceArray<std::uint16_t>& memory) {
      return AnyMatrix{memory.data(), Scalar::bf16, kTokens, kLayers * d, kLayers * d};
    };
    const auto sum = [&](std::int64_t which) { return Array<double>{sums.data() + which * kLayers, kLayers}; };
    transpose(execution, activations, hits, workspace.array());
    decode_forward(execution, activations, 0, kTokens, decoder.rows, 0, matrix(y));
    residual_and_loss(execution, matrix(y), 1, matrix(target), centre.array(), centre.array(), standardise.array(),
                      kLayers, 1e-3f, matrix(gradient_rows), {sum(0), sum(1), sum(2)}, workspace.array());
    decode_backward_update(execution, activations, hits, matrix(gradient_rows), decoder.rows, adam.data(),
                           gradient.array(), {}, workspace.array(), {}, {}, {});
    encode_backward_update(execution, activations, hits, matrix(x), gradient.array(), encoder.rows, biases, adam.data(),
                           {}, workspace.array());
    advance_clocks(execution, hits, kTokens, adam.data(), clocks.array());
  }

  std::vector<std::uint16_t> state() const {
    std::vector<std::uint16_t> bits;
    encoder.append(bits);
    decoder.append(bits);
    return bits;
  }
};

TEST_CASE("replays of a recorded step give the bits of eager steps") {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const std::int64_t d : {13, 384, 768}) {  // scalar kernels, partly filled and full groups of columns
    CAPTURE(d);
    const Step eager(d, stream), recorded(d, stream);
    check_cuda(cudaDeviceSynchronize(), "uploads");
    for (int i = 0; i < 3; ++i) eager.enqueue();

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of the capture");
    recorded.enqueue();
    check_cuda(cudaStreamEndCapture(stream, &graph), "end of the capture");
    check_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    for (int i = 0; i < 3; ++i) check_cuda(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    check_cuda(cudaStreamSynchronize(stream), "the steps");
    CHECK(eager.state() == recorded.state());
    CHECK(eager.bias_state.download() == recorded.bias_state.download());
    CHECK(eager.sums.download() == recorded.sums.download());
    CHECK(eager.clocks.download() == recorded.clocks.download());
    CHECK(std::isfinite(eager.sums.download()[0]));
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace weft::testing

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  doctest::Context context(argc, argv);
  const int result = context.run();
  weft::testing::check_cuda(cudaDeviceSynchronize(), "the tests");
  return result;
}

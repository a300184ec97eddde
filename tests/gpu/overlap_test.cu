// SPDX-License-Identifier: Apache-2.0
//
// A recorded step keeps the priorities of its streams (device/stream.hpp). No MPI; exits with 77 (skipped) without a
// GPU.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "device/stream.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/peers/peers_cuda.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/select/hopper_filter.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "tests/gpu/device_array.hpp"

namespace weft::device {
namespace {

constexpr int kBlocks = 20000, kThreads = 1024;  // many times what a GPU holds at once

void ok(cudaError_t status) { REQUIRE_MESSAGE(status == cudaSuccess, cudaGetErrorString(status)); }

/// Each block takes about 15 us, and counts itself in the end.
__global__ void count_blocks(unsigned* done) {
  const long long begin = clock64();
  while (clock64() - begin < 30000) {
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(done, 1u);
}

__global__ void wait_for_first(const volatile unsigned* done) {
  while (*done == 0) {
  }
}

__global__ void read_count(const volatile unsigned* done, unsigned* seen) { *seen = *done; }

using testing::DeviceArray;

struct Ends {
  float exchanges, work;  // milliseconds after the beginning of the graph
};

/// Four exchanges of a group of one rank in the same graph as `work`, all of which can start with it.
Ends run_beside_exchanges(const char* what, const std::function<void(const kernels::Execution&)>& work) {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const DeviceArray<kernels::cuda::PeerPage> page(1);
  ok(cudaMemset(page.data(), 0, sizeof(kernels::cuda::PeerPage)));
  kernels::cuda::PeerGroup group{};
  group.page[0] = page.data();
  cudaEvent_t begin = nullptr, exchanged = nullptr, worked = nullptr;
  for (cudaEvent_t* event : {&begin, &exchanged, &worked}) ok(cudaEventCreate(event));
  Ends ends{};
  {
    const kernels::Execution computation{kernels::Backend::cuda, stream};
    const Stream exchange(computation);
    const auto communication = static_cast<cudaStream_t>(exchange.execution().stream);
    Event fork, join;
    work(computation);  // prepares what is prepared on first use
    Graph graph;
    graph.capture(computation, [&] {
      ok(cudaEventRecordWithFlags(begin, stream, cudaEventRecordExternal));
      fork.record(computation);
      fork.hold_back(exchange.execution());
      work(computation);
      ok(cudaEventRecordWithFlags(worked, stream, cudaEventRecordExternal));
      for (int i = 0; i < 4; ++i) {
        kernels::cuda::begin_exchange(exchange.execution(), group);
        kernels::cuda::end_exchange(exchange.execution(), group);
      }
      ok(cudaEventRecordWithFlags(exchanged, communication, cudaEventRecordExternal));
      join.record(exchange.execution());
      join.hold_back(computation);
    });
    for (int turn = 0; turn < 3; ++turn) {  // the last one is reported
      graph.replay(computation);
      ok(cudaStreamSynchronize(stream));
    }
    ok(cudaEventElapsedTime(&ends.exchanges, begin, exchanged));
    ok(cudaEventElapsedTime(&ends.work, begin, worked));
    std::printf("%s: %.3f ms, exchanges end after %.3f ms\n", what, static_cast<double>(ends.work),
                static_cast<double>(ends.exchanges));
  }
  for (cudaEvent_t event : {begin, exchanged, worked}) cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  return ends;
}

}  // namespace

TEST_CASE("exchanges run beside the encoder's products and their filter") {
  const std::int64_t n_tokens = 2048, n_layers = 4, d = 768, n_features = 16384, capacity = 1024;
  DeviceArray<std::uint16_t> x(n_tokens * n_layers * d), weight(n_features * d);
  x.poison(0), weight.poison(0);
  const std::vector<kernels::AnyMatrix> of_layer(
      n_layers, kernels::AnyMatrix{weight.data(), kernels::Scalar::bf16, n_features, d, d});
  const kernels::EncoderOperands operands{
      {x.data(), kernels::Scalar::bf16, n_tokens, n_layers * d, n_layers * d}, of_layer, {}};
  if (!kernels::cuda::takes_hopper_filter(operands)) return;
  const DeviceArray<float> limit(std::vector<float>(static_cast<std::size_t>(n_layers * n_features), 1.0f)),
      bias(std::vector<float>(static_cast<std::size_t>(n_features), 0.0f)), value(capacity);
  const DeviceArray<std::uint32_t> threshold(std::vector<std::uint32_t>{0x3f800000u}), key(capacity);
  const DeviceArray<unsigned long long> cursor(std::vector<unsigned long long>{0});
  const DeviceArray<uint2> segment(n_tokens * n_layers * (n_features / kernels::cuda::kHopperFeatures));
  const std::vector<const float*> biases(n_layers, bias.data());
  const kernels::cuda::HopperFilter filter{.limit = limit.data(),
                                           .bias = biases.data(),
                                           .bounds = nullptr,
                                           .padded_features = n_features,
                                           .threshold = threshold.data(),
                                           .cursor = cursor.data(),
                                           .cursor_stride = 1,
                                           .capacity = capacity,
                                           .key = key.data(),
                                           .value = value.data(),
                                           .segment = segment.data(),
                                           .all_layers = true};
  const Ends ends = run_beside_exchanges("products and filter", [&](const kernels::Execution& execution) {
    kernels::cuda::filter_hopper_products(execution, operands, 0, n_layers, filter);
  });
  CHECK(ends.exchanges < ends.work / 2);
}

TEST_CASE("exchanges run beside the decoder's backward pass") {
  const std::int64_t n_tokens = 1024, n_layers = 4, d = 768, n_features = 16384, k = 16;
  const std::int64_t nnz = n_tokens * n_layers * k, n_keys = n_layers * n_features, width = n_layers * d;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(n_tokens + 1));
  std::vector<std::uint32_t> key;
  for (std::int64_t n = 0; n < n_tokens; ++n) {
    rows[static_cast<std::size_t>(n + 1)] = (n + 1) * n_layers * k;
    for (std::int64_t i = 0; i < n_layers * k; ++i)  // ascending, spread over all features
      key.push_back(static_cast<std::uint32_t>(i * (n_keys / (n_layers * k)) + n * 37 % (n_keys / (n_layers * k))));
  }
  const DeviceArray<std::int64_t> d_rows(rows), offsets(n_keys + 1);
  const DeviceArray<std::uint32_t> d_key(key), token(nnz), position(nnz);
  const DeviceArray<float> value(std::vector<float>(static_cast<std::size_t>(nnz), 1.0f)), da(nnz);
  const kernels::SparseActivations activations{n_tokens,       n_layers,      n_features,
                                               d_rows.array(), d_key.array(), value.array()};
  const kernels::FeatureHits hits{offsets.array(), token.array(), position.array()};
  struct Storage {
    DeviceArray<std::uint16_t> weight;
    DeviceArray<std::uint8_t> first, second;
    DeviceArray<float> first_scale, second_scale;
  };
  std::vector<Storage> storage;
  std::vector<kernels::ParameterRows> decoder;
  for (std::int64_t s = 0; s < n_layers; ++s) {
    kernels::ParameterRows p;
    p.storage = kernels::StorageType::eight_bit;
    p.rows = n_features, p.columns = (n_layers - s) * d, p.segment = d;
    const std::int64_t size = p.rows * p.columns, blocks = p.rows * p.blocks_per_row();
    storage.push_back({DeviceArray<std::uint16_t>(size), DeviceArray<std::uint8_t>(size),
                       DeviceArray<std::uint8_t>(size), DeviceArray<float>(blocks), DeviceArray<float>(blocks)});
    Storage& memory = storage.back();
    memory.weight.poison(0), memory.first.poison(0), memory.second.poison(0);
    memory.first_scale.poison(0), memory.second_scale.poison(0);
    p.weight = memory.weight.data();
    p.first_moment = memory.first.data(), p.second_moment = memory.second.data();
    p.first_scale = memory.first_scale.data(), p.second_scale = memory.second_scale.data();
    decoder.push_back(p);
  }
  DeviceArray<std::uint16_t> gradient(n_tokens * width);
  gradient.poison(0);
  kernels::AdamStep step{};
  step.first_gain = step.second_gain = step.first_correction = step.second_correction = step.gradient_scale = 1;
  step.epsilon = 1e-8f;
  step.step = 1;
  const DeviceArray<kernels::AdamStep> constants(std::vector<kernels::AdamStep>{step});
  const DeviceArray<std::byte> workspace(
      std::max(kernels::decode_backward_workspace(kernels::Backend::cuda, n_layers, n_features, d, nnz, false),
               kernels::transpose_workspace(kernels::Backend::cuda, n_keys, nnz)));
  kernels::transpose({kernels::Backend::cuda, nullptr}, activations, hits, workspace.array());
  ok(cudaDeviceSynchronize());
  kernels::cuda::use_barriers();
  const Ends ends = run_beside_exchanges("decoder backward", [&](const kernels::Execution& execution) {
    kernels::decode_backward_update(execution, activations, hits,
                                    {gradient.data(), kernels::Scalar::bf16, n_tokens, width, width}, decoder,
                                    constants.data(), da.array(), {}, workspace.array(), {}, {}, {});
  });
  CHECK(ends.exchanges < ends.work / 2);
}

TEST_CASE("exchanges run beside products of a language model") {
  // The MLP of one of two ranks: 1.56B parameters, half of a micro-batch.
  const std::int64_t rows = 8192, width = 1600, hidden = 3200;
  DeviceArray<std::uint16_t> x(rows * width), weight(hidden * width), y(rows * hidden);
  x.poison(0), weight.poison(0);
  const auto matrix = [](const DeviceArray<std::uint16_t>& memory, std::int64_t columns) {
    return kernels::AnyMatrix{memory.data(), kernels::Scalar::bf16, memory.size() / columns, columns, columns};
  };
  const DeviceArray<std::byte> workspace(std::max(
      kernels::gemm_workspace(kernels::Scalar::bf16, kernels::Scalar::bf16, kernels::Scalar::bf16, rows, hidden, width),
      kernels::gemm_workspace(kernels::Scalar::bf16, kernels::Scalar::bf16, kernels::Scalar::bf16, rows, width,
                              hidden)));
  const Ends ends = run_beside_exchanges("products", [&](const kernels::Execution& execution) {
    for (int i = 0; i < 4; ++i) {
      kernels::gemm(execution, 1, matrix(x, width), kernels::Form::plain, matrix(weight, width),
                    kernels::Form::transposed, 0, matrix(y, hidden), workspace.array());
      kernels::gemm(execution, 1, matrix(y, hidden), kernels::Form::plain, matrix(weight, width), kernels::Form::plain,
                    0, matrix(x, width), workspace.array());
    }
  });
  CHECK(ends.exchanges < ends.work / 2);
}

TEST_CASE("a kernel of an exchange does not queue behind the blocks of a large kernel of the same graph") {
  cudaStream_t stream = nullptr;
  unsigned* counts = nullptr;  // done, seen
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ok(cudaMallocManaged(&counts, 2 * sizeof(unsigned)));
  {
    const kernels::Execution computation{kernels::Backend::cuda, stream};
    const Stream exchange(computation);
    const auto communication = static_cast<cudaStream_t>(exchange.execution().stream);
    Event begun, exchanged;
    Graph graph;
    graph.capture(computation, [&] {
      ok(cudaMemsetAsync(counts, 0, 2 * sizeof(unsigned), stream));
      begun.record(computation);
      begun.hold_back(exchange.execution());
      count_blocks<<<kBlocks, kThreads, 0, stream>>>(counts);
      // The second kernel is ready when the first blocks of the large one have run, long before the last.
      wait_for_first<<<1, 1, 0, communication>>>(counts);
      read_count<<<1, 1, 0, communication>>>(counts, counts + 1);
      exchanged.record(exchange.execution());
      exchanged.hold_back(computation);
    });
    for (int turn = 0; turn < 3; ++turn) {
      graph.replay(computation);
      ok(cudaStreamSynchronize(stream));
      CHECK(counts[0] == kBlocks);
      CHECK(counts[1] > 0);
      CHECK(counts[1] < kBlocks / 2);
    }
  }
  cudaFree(counts);
  cudaStreamDestroy(stream);
}

}  // namespace weft::device

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: skipped\n");
    return 77;
  }
  return doctest::Context(argc, argv).run();
}

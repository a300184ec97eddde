// SPDX-License-Identifier: Apache-2.0
//
// A recorded step keeps the priorities of its streams (device/stream.hpp). No MPI; exits with 77 (skipped) without a
// GPU.
#define DOCTEST_CONFIG_IMPLEMENT
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstdio>

#include "device/stream.hpp"

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

}  // namespace

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
    graph.record(computation, [&] {
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

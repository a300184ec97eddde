// SPDX-License-Identifier: Apache-2.0
//
// Gram norms of products (fused.hpp): a block forms pairs of tiles of 128 positions, X_b X_bᵀ and then G_b G_bᵀ, and
// sums the products of their entries. Each warpgroup has 64 x 128 sums of both in registers. A stage has 64 columns of
// 128 rows i and of 128 rows j, which are read as they lie in global memory, with the sum over their columns.
//
// Limit: shared memory. A product of 64 x 128 x 16 reads 6 KB of it, and a stage of 32 KB arrives per eight of them.
#include "kernels/privacy/hopper_panels_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kPairStages = 6, kPanels = 2 * kTileSide / kPanelRows, kPairBytes = kPanels * kPanelBytes;
constexpr int kEntries = kTileSide / 2;  // of a thread: 64 x 128 of 128 threads

struct Pairs {
  CUtensorMap x, g;  // in panels
  std::int64_t in, out;
  const std::int64_t* offsets;
  std::int64_t least, side, tasks;  // as in GramPairs; examples * gram_pairs(side)
  double error;
  double* parts;  // [examples, gram_pairs(side), kHopperWarps]
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using PairStages = Ring<kPairBytes, kPairStages>;

/// Tiles i <= j of an example.
struct Pair {
  std::int64_t first, second, end;  // rows
  bool diagonal, empty;

  __device__ Pair(const Pairs& a, std::int64_t task) {
    const std::int64_t pairs = gram_pairs(a.side), e = task / pairs, pair = task % pairs;
    std::int64_t j = 0;
    while (gram_pairs(j + 1) <= pair) ++j;
    const std::int64_t i = pair - gram_pairs(j), begin = a.offsets[e];
    end = a.offsets[e + 1];
    first = begin + i * kTileSide, second = begin + j * kTileSide;
    diagonal = i == j, empty = end - begin <= a.least || second >= end;
  }
};

__device__ __forceinline__ int stages_of(std::int64_t columns) {
  return static_cast<int>((columns + kPanelColumns - 1) / kPanelColumns);
}

constexpr std::uint64_t kSixteenColumns = 16 * 2 >> 4, kPairStage = kPairBytes >> 4;  // in a descriptor

__device__ __forceinline__ void produce(const Pairs& a, PairStages ring) {
  for (std::int64_t t = blockIdx.x; t < a.tasks; t += gridDim.x) {
    const Pair pair(a, t);
    if (pair.empty) continue;
    const int of_x = stages_of(a.in), all = of_x + stages_of(a.out);
    for (int s = 0; s < all; ++s, ring.next()) {
      const CUtensorMap& from = s < of_x ? a.x : a.g;
      const std::int64_t column = static_cast<std::int64_t>(s < of_x ? s : s - of_x) * kPanelColumns;
      wait_barrier(ring.empty(), ring.phase ^ 1);
      expect_bytes(ring.full(), kPairBytes);
#pragma unroll
      for (int p = 0; p < kPanels; ++p)
        copy_panel(ring.data() + p * kPanelBytes, from, column,
                   (p < kPanels / 2 ? pair.first : pair.second) + p % (kPanels / 2) * kPanelRows, ring.full());
    }
  }
}

/// c += the products of `count` stages.
__device__ __forceinline__ void add_stages(PairStages& ring, int warpgroup, int count, float (&c)[kEntries]) {
  const std::uint64_t of_i = operand_at(ring.base + warpgroup * kPanelBytes, 16),
                      of_j = operand_at(ring.base + kPanels / 2 * kPanelBytes, 16);
  fence_sums(c);
  std::uint32_t before = 0;  // barrier of the stage before
#pragma unroll 1
  for (int s = 0; s < count; ++s) {
    wait_barrier(ring.full(), ring.phase);
    begin_products();
#pragma unroll
    for (int k = 0; k < kPanelColumns / 16; ++k)
      multiply<false>(c, of_i + ring.stage * kPairStage + k * kSixteenColumns,
                      of_j + ring.stage * kPairStage + k * kSixteenColumns, true);
    commit_products();
    wait_products<1>();
    if (s > 0) release(before);
    before = ring.empty();
    ring.next();
  }
  wait_products<0>();
  fence_sums(c);
  release(before);
}

__device__ __forceinline__ void consume(const Pairs& a, PairStages ring) {
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128), lane = static_cast<int>(threadIdx.x) % kWarp;
  const int of_x = uniform(stages_of(a.in)), of_g = uniform(stages_of(a.out));
  for (std::int64_t t = blockIdx.x; t < a.tasks; t += gridDim.x) {
    const Pair pair(a, t);
    double sum = 0;
    if (!pair.empty) {
      float x[kEntries] = {}, g[kEntries] = {};
      add_stages(ring, warpgroup, of_x, x);
      add_stages(ring, warpgroup, of_g, g);
      // Entry i: row lane / 4 + 8 (i / 2 % 2) of the 16 of a warp, column 2 (lane % 4) + 8 (i / 4) + i % 2. Those
      // beyond the end are of the next example.
      const std::int64_t row = pair.first + static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4,
                         column = pair.second + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kEntries; ++i)
        if (row + i / 2 % 2 * 8 < pair.end && column + i / 4 * 8 + i % 2 < pair.end)
          sum += at_most(static_cast<double>(x[i]) * static_cast<double>(g[i]), a.error);
      if (!pair.diagonal) sum *= 2;
    }
    store_part(a.parts + t * kHopperWarps, sum);
  }
}

#endif

__global__ void __launch_bounds__(kHopperThreads, 1) form_pairs(const __grid_constant__ Pairs a) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // form_hopper_gram rejects other GPUs
#else
  const PairStages ring;
  if (threadIdx.x < kHopperConsumers)
    consume(a, ring);
  else if (threadIdx.x == kHopperConsumers)
    produce(a, ring);
#endif
}

}  // namespace

void form_hopper_gram(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                      std::int64_t least, double error, double* parts) {
  const std::int64_t side = tiles_of(examples.most_rows()), tasks = examples.count() * gram_pairs(side);
  if (tasks == 0) return;
  const Pairs a{.x = panels_of(x, examples.offsets.back()),
                .g = panels_of(g, examples.offsets.back()),
                .in = x.columns,
                .out = g.columns,
                .offsets = examples.device_offsets.data,
                .least = least,
                .side = side,
                .tasks = tasks,
                .error = error,
                .parts = parts};
  launch_hopper(execution, form_pairs, blocks_for(tasks, 1, multiprocessors()), ring_bytes(kPairBytes, kPairStages), a);
}

}  // namespace weft::kernels::cuda

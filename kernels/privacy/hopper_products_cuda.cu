// SPDX-License-Identifier: Apache-2.0
//
// Norms and clipped sums of products (fused.hpp) on Hopper's warpgroup matrix instructions (PTX ISA, wgmma): a block
// forms tiles of 128 x 256 of G_bᵀ X_b, one after the other. Two warpgroups of consumers have 64 x 256 sums each in
// registers. Both operands are read from shared memory as they lie in global memory, with the sum over their rows.
//
// Tiles of a clipped sum that do not fill a round of all blocks are shared (HopperShares): a second kernel adds the
// parts of such a tile in the order of their rows. Concurrent blocks read the same rows and few columns, so
// that these stay in the L2 cache. Whole tiles are added to memory by reductions (PTX ISA, red): no thread waits for a
// read of the sum. Measured variants: docs/experiments_log.md.
//
// Rates and their limits: docs/private_performance.md.
#include "kernels/privacy/hopper_panels_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kRows = kPanelRows, kStages = 4;
constexpr int kPanelsG = kHopperOutputs / kPanelColumns, kPanelsX = kHopperInputs / kPanelColumns;
constexpr int kStageBytes = (kPanelsG + kPanelsX) * kPanelBytes;
constexpr int kSums = kSumsOfThread;
static_assert(kHopperInputs == 256);

struct Products {
  CUtensorMap x, g;  // in panels
  std::int64_t in, out;
  const std::int64_t* offsets;
  std::int64_t examples;
  std::int64_t least;    // examples of at most so many rows are left out
  double* squares;       // norms: [examples, hopper_tiles, kHopperWarps]
  const float* factors;  // sums: of the examples
  std::int64_t stages;   // sums: of all examples, factors of 0 included
  HopperShares shares;   // sums
  float* sums;           // sums: [out, stride], added to
  std::int64_t stride;
  float* parts;  // sums: [workers, 2] parts of shared tiles, row by row
};

/// First column of G and of X of a tile. Adjacent tiles have few columns of both together.
struct Place {
  std::int64_t output, input;

  __device__ Place(const Products& a, int tile) {
    const int across = static_cast<int>(hopper_across(a.in)), down = static_cast<int>(tiles_of(a.out));
    output = (down < across ? tile % down : tile / across) * kHopperOutputs;
    input = (down < across ? tile / down : tile % across) * kHopperInputs;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using Stages = Ring<kStageBytes, kStages>;

/// Stages [begin, end) of the examples [first, last) of a tile.
struct Task {
  std::int64_t tile, first, last, begin, end;
  std::int64_t part;  // sums: its number, or -1: the whole tile
};

/// The tasks of this block. Norms: every tile of every example.
template <bool sums>
struct Tasks {
  const Products& a;
  const std::int64_t tiles;
  std::int64_t whole;      // the next whole tile
  int range = 0, end = 0;  // of shared ones
  Task task = {};

  __device__ explicit Tasks(const Products& products)
      : a(products), tiles(hopper_tiles(products.in, products.out)), whole(blockIdx.x) {
    const int block = static_cast<int>(blockIdx.x);
    if (!sums || block >= a.shares.workers()) return;
    range = a.shares.first_range(block);
    end = range + a.shares.units;
  }
  __device__ bool next() {
    if constexpr (!sums) {
      if (whole >= a.examples * tiles) return false;
      const std::int64_t e = whole / tiles;
      task = {whole % tiles, e, e + 1, 0, hopper_stages(a.offsets[e + 1] - a.offsets[e]), -1};
      whole += gridDim.x;
      return true;
    }
    const std::int64_t not_shared = tiles - a.shares.tiles;
    if (whole < not_shared) {
      task = {whole, 0, a.examples, 0, a.stages, -1};
      whole += kHopperWorkers;
      return true;
    }
    if (range >= end) return false;
    const int cuts = a.shares.cuts, cut = range % cuts, next = min(cuts, cut + end - range);
    task = {not_shared + a.shares.tile_of(blockIdx.x, range),
            0,
            a.examples,
            a.stages * cut / cuts,
            a.stages * next / cuts,
            a.shares.part_of(blockIdx.x, range)};
    range += next - cut;
    return true;
  }
};

/// The rows of a task by examples. Examples without rows or with factor 0 are skipped.
struct ExamplesOf {
  const Products& a;
  const Task& task;
  std::int64_t example, before = 0;  // stages of the examples before the next one
  std::int64_t row = 0;
  int rows = 0;
  float factor = 1;

  __device__ ExamplesOf(const Products& products, const Task& of) : a(products), task(of), example(of.first) { find(); }
  __device__ bool valid() const { return example < task.last; }
  __device__ int stages() const { return (rows + kRows - 1) / kRows; }
  __device__ void find() {
    for (; example < task.last; ++example) {
      row = a.offsets[example];
      const std::int64_t count = a.offsets[example + 1] - row, stages = hopper_stages(count);
      const std::int64_t begin = max(task.begin - before, std::int64_t{0}), end = min(task.end - before, stages);
      before += stages;
      if (a.factors != nullptr) factor = a.factors[example];
      if (count <= a.least || begin >= end || !(factor >= kLeastFactor)) continue;
      row += begin * kRows;
      rows = static_cast<int>(min(count - begin * kRows, (end - begin) * kRows));
      return;
    }
  }
  __device__ void next() {
    ++example;
    find();
  }
};

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kHopperConsumers) : "memory"); }

/// Rows [valid, kRows) of a stage belong to the next example: they become 0.
__device__ __forceinline__ void clear_rows(std::uint32_t stage, int valid) {
  const int of_panel = (kRows - valid) * 8;
  for (int i = static_cast<int>(threadIdx.x); i < (kPanelsG + kPanelsX) * of_panel; i += kHopperConsumers)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(stage + i / of_panel * kPanelBytes + valid * 128 +
                                                                  i % of_panel * 16),
                 "r"(0)
                 : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read what these stores wrote
  sync_consumers();
}

constexpr std::uint64_t kSixteenRows = 16 * 128 >> 4, kStage = kStageBytes >> 4;  // in a descriptor

/// The thread that requests the operands of all tasks of its block.
template <bool sums>
__device__ __forceinline__ void produce(const Products& a, Stages ring) {
  for (Tasks<sums> tasks(a); tasks.next();) {
    const auto [output, input] = Place(a, static_cast<int>(tasks.task.tile));
    for (ExamplesOf each(a, tasks.task); each.valid(); each.next())
      for (int i = 0; i < each.rows; i += kRows, ring.next()) {
        wait_barrier(ring.empty(), ring.phase ^ 1);
        expect_bytes(ring.full(), kStageBytes);
#pragma unroll
        for (int p = 0; p < kPanelsG; ++p)
          copy_panel(ring.data() + p * kPanelBytes, a.g, output + p * kPanelColumns, each.row + i, ring.full());
#pragma unroll
        for (int p = 0; p < kPanelsX; ++p)
          copy_panel(ring.data() + (kPanelsG + p) * kPanelBytes, a.x, input + p * kPanelColumns, each.row + i,
                     ring.full());
      }
  }
}

/// Stores the norm of the tile, by warp. Squares in fp32 eight at a time: their error is far below kNormMargin, and
/// conversions to fp64 are slow.
__device__ __forceinline__ void store_squares(const Products& a, const Task& task, const float (&c)[kSums]) {
  double total = 0;
#pragma unroll
  for (int i = 0; i < kSums; i += 8) {
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) square += c[i + k] * c[i + k];
    total += static_cast<double>(square);
  }
  store_part(a.squares + (task.first * hopper_tiles(a.in, a.out) + task.tile) * kHopperWarps, total);
}

/// Calls to(row, column, at) for each pair of adjacent sums c[at], c[at + 1] of this thread, where they are in the
/// tile.
template <class To>
__device__ __forceinline__ void for_pairs(const To& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kSums; i += 2) to(row + i / 2 % 2 * 8, column + i / 4 * 8, i);
}

/// Adds *to += value as a reduction, without waiting for the old value. Every element gets one addition per kernel, so
/// that their order does not matter. Sums below the normal numbers become 0.
__device__ __forceinline__ void add_pair(float* to, float2 value) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x), "f"(value.y) : "memory");
}

__device__ __forceinline__ void store_sums(const Products& a, const Task& task, float scale, const float (&c)[kSums]) {
  if (task.part >= 0) {
    float* const part = a.parts + task.part * kHopperOutputs * kHopperInputs;
    return for_pairs([&](int row, int column, int i) {
      *reinterpret_cast<float2*>(part + row * kHopperInputs + column) = make_float2(scale * c[i], scale * c[i + 1]);
    });
  }
  const auto [output, input] = Place(a, static_cast<int>(task.tile));
  float* const sums = a.sums + output * a.stride + input;
  for_pairs([&](int row, int column, int i) {
    if (output + row < a.out && input + column < a.in)
      add_pair(sums + row * a.stride + column, make_float2(scale * c[i], scale * c[i + 1]));
  });
}

template <bool sums>
__device__ __forceinline__ void consume(const Products& a, Stages ring) {
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  const std::uint64_t of_g = operand_at(ring.base + warpgroup * kPanelBytes, kPanelBytes),
                      of_x = operand_at(ring.base + kPanelsG * kPanelBytes, kPanelBytes);
  for (Tasks<sums> tasks(a); tasks.next();) {
    float c[kSums] = {};
    float scale = 0.0f;  // sums: c is the sum so far divided by it
    for (ExamplesOf each(a, tasks.task); each.valid(); each.next()) {
      if constexpr (sums) {
        const float ratio = scale == 0.0f ? 0.0f : scale / each.factor;
#pragma unroll
        for (int i = 0; i < kSums; ++i) c[i] *= ratio;
        scale = each.factor;
      }
      fence_sums(c);
      const int stages = uniform(each.stages());
      std::uint32_t before = 0;  // barrier of the stage before
#pragma unroll 1
      for (int i = 0; i < stages; ++i) {
        wait_barrier(ring.full(), ring.phase);
        if (i + 1 == stages && each.rows % kRows != 0) clear_rows(ring.data(), each.rows % kRows);
        begin_products();
#pragma unroll
        for (int k = 0; k < kRows / 16; ++k)
          multiply<true>(c, of_g + ring.stage * kStage + k * kSixteenRows,
                         of_x + ring.stage * kStage + k * kSixteenRows, true);
        commit_products();
        wait_products<1>();
        if (i > 0) release(before);
        before = ring.empty();
        ring.next();
      }
      wait_products<0>();
      fence_sums(c);
      release(before);
    }
    if constexpr (sums)
      store_sums(a, tasks.task, scale, c);
    else
      store_squares(a, tasks.task, c);
  }
}

#endif

template <bool sums>
__global__ void __launch_bounds__(kHopperThreads, 1) form_products(const __grid_constant__ Products a) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // form_hopper_… reject other GPUs
#else
  const Stages ring;
  if (threadIdx.x < kHopperConsumers)
    consume<sums>(a, ring);
  else if (threadIdx.x == kHopperConsumers)
    produce<sums>(a, ring);
#endif
}

constexpr int kAddedRows = 4;  ///< of a tile, by a block of kHopperConsumers threads

/// Block (s, rows): adds the parts of shared tile s.
__global__ void __launch_bounds__(kHopperConsumers) add_shared_tiles(const __grid_constant__ Products a) {
  const Place place(a, static_cast<int>(hopper_tiles(a.in, a.out) - a.shares.tiles + blockIdx.x));
  constexpr int kFours = kHopperInputs / 4;
  const int row = static_cast<int>(blockIdx.y) * kAddedRows + static_cast<int>(threadIdx.x) / kFours,
            column = static_cast<int>(threadIdx.x) % kFours * 4;
  if (place.output + row >= a.out || place.input + column >= a.in) return;
  float4 total{0.0f, 0.0f, 0.0f, 0.0f};
  a.shares.for_each_part(static_cast<int>(blockIdx.x), [&](int part) {
    const float4 value =
        *reinterpret_cast<const float4*>(a.parts + (part * kHopperOutputs + row) * kHopperInputs + column);
    total.x += value.x, total.y += value.y, total.z += value.z, total.w += value.w;
  });
  float2* const to = reinterpret_cast<float2*>(a.sums + (place.output + row) * a.stride + place.input + column);
  to[0] = make_float2(to[0].x + total.x, to[0].y + total.y);
  to[1] = make_float2(to[1].x + total.z, to[1].y + total.w);
}

Products products_of(const TileMatrix& x, const TileMatrix& g, const Examples& examples) {
  Products a{};
  a.x = panels_of(x, examples.offsets.back());
  a.g = panels_of(g, examples.offsets.back());
  a.in = x.columns;
  a.out = g.columns;
  a.offsets = examples.device_offsets.data;
  a.examples = examples.count();
  return a;
}

}  // namespace

bool has_hopper_products() { return is_hopper(); }

void form_hopper_norms(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                       std::int64_t least, double* parts) {
  if (examples.count() == 0) return;
  Products a = products_of(x, g, examples);
  a.least = least;
  a.squares = parts;
  launch_hopper(execution, form_products<false>,
                blocks_for(a.examples * hopper_tiles(a.in, a.out), 1, multiprocessors()),
                ring_bytes(kStageBytes, kStages), a);
}

void add_hopper_sums(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                     const float* factors, Matrix<float> out, float* parts) {
  if (examples.count() == 0) return;
  Products a = products_of(x, g, examples);
  a.factors = factors;
  for (std::int64_t e = 0; e < a.examples; ++e) a.stages += hopper_stages(examples.rows_of(e));
  a.shares = hopper_shares(hopper_tiles(a.in, a.out), a.stages);
  a.sums = out.data;
  a.stride = out.stride;
  a.parts = parts;
  launch_hopper(execution, form_products<true>, static_cast<unsigned>(kHopperWorkers), ring_bytes(kStageBytes, kStages),
                a);
  if (a.shares.tiles == 0) return;
  add_shared_tiles<<<dim3(static_cast<unsigned>(a.shares.tiles), kHopperOutputs / kAddedRows), kHopperConsumers, 0,
                     stream_of(execution)>>>(a);
  require_launch("parts of clipped sums");
}

}  // namespace weft::kernels::cuda

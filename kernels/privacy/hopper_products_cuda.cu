// SPDX-License-Identifier: Apache-2.0
//
// Norms and clipped sums of products (fused.hpp) on Hopper's warpgroup matrix instructions (PTX ISA, wgmma): a block
// forms tiles of 128 x 256 of G_bᵀ X_b, one after the other. Of a clipped sum it forms whole tiles first and then an
// equal part of the sums of the tiles that are left (Stream-K, Osama et al., arXiv 2301.03598); a second kernel adds
// the parts of a tile in the order of their rows. Two warpgroups of consumers have 64 x 256 sums each in registers; one
// thread of a further warp requests the operands from the copy engine (cp.async.bulk.tensor). Both operands are read
// from shared memory as they lie in global memory, with the sum over their rows.
//
//   shared memory   kStages stages of kRows rows; panels of 64 columns (128 bytes per row), swizzled over 128 bytes
//   full[stage]     the copies of a stage have arrived
//   empty[stage]    every warp of consumers has read it: it may be overwritten
//
// The warpgroups do not wait for each other, so that one multiplies while the other scales or stores its sums. What
// they do per stage must be little: with a fence of the GPU (mbarrier.arrive.release.cluster) and more branches the
// norms ran at 455 TFLOP/s. Clusters of two blocks that share their columns of X gained nothing then.
//
// Reached on an H200, for matrices of 768 x 2304 to 768 x 50304 and 16 x 1024 rows: norms 669 to 735 TFLOP/s, sums 532
// to 707, one product of the dense library over the same rows 579 to 761.
#include <cuda.h>

#include "kernels/bulk_copy_cuda.cuh"
#include "kernels/hopper_cuda.cuh"
#include "kernels/privacy/hopper_products.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr int kConsumers = 256, kThreads = kConsumers + kWarp, kWarps = kConsumers / kWarp;
constexpr int kRows = static_cast<int>(kHopperRows), kStages = 4;
constexpr int kPanelColumns = 64, kPanelBytes = kRows * kPanelColumns * 2;
constexpr int kPanelsG = kHopperOutputs / kPanelColumns, kPanelsX = kHopperInputs / kPanelColumns;
constexpr int kStageBytes = (kPanelsG + kPanelsX) * kPanelBytes;
constexpr int kSharedBytes = kSwizzleAlignment + kStages * (kStageBytes + 2 * static_cast<int>(sizeof(std::uint64_t)));
constexpr int kSums = kSumsOfThread;
static_assert(kSharedBytes <= 227 * 1024 && kWarps == kHopperWarps && kHopperInputs == 256);

struct Products {
  CUtensorMap x, g;  // in panels
  std::int64_t in, out;
  const std::int64_t* offsets;
  std::int64_t examples;
  std::int64_t least;    // examples of at most so many rows are left out
  double* squares;       // norms: [examples, hopper_tiles, kHopperWarps]
  const float* factors;  // sums: of the examples
  std::int64_t stages;   // sums: of all examples, factors of 0 included
  std::int64_t shared;   // sums: the last so many tiles are shared
  float* sums;           // sums: [out, stride], added to
  std::int64_t stride;
  float* parts;  // sums: [workers, 2] parts of shared tiles, row by row
};

/// First of the stages of worker w, counted over the shared tiles.
__host__ __device__ __forceinline__ std::int64_t first_stage(const Products& a, std::int64_t w) {
  return a.shared * a.stages * w / kHopperWorkers;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

extern __shared__ unsigned char hopper_shared[];

/// Stages [begin, end) of the examples [first, last) of a tile.
struct Task {
  std::int64_t tile, first, last, begin, end;
  int part;  // sums: which of its worker's parts it is, if it is not the whole tile

  __device__ std::int64_t output(const Products& a) const { return tile / hopper_across(a.in) * kHopperOutputs; }
  __device__ std::int64_t input(const Products& a) const { return tile % hopper_across(a.in) * kHopperInputs; }
  __device__ bool whole(const Products& a) const { return begin == 0 && end == a.stages; }
};

/// The tasks of this block. Norms: every tile of every example.
template <bool sums>
struct Tasks {
  const Products& a;
  const std::int64_t tiles;
  std::int64_t next_task, stage = 0, end = 0;
  Task task = {};

  __device__ explicit Tasks(const Products& products)
      : a(products), tiles(hopper_tiles(products.in, products.out)), next_task(blockIdx.x) {
    if constexpr (sums) stage = first_stage(a, blockIdx.x), end = first_stage(a, blockIdx.x + 1);
  }
  __device__ bool next() {
    if constexpr (!sums) {
      if (next_task >= a.examples * tiles) return false;
      const std::int64_t example = next_task / tiles;
      task = {
          next_task % tiles, example, example + 1, 0, hopper_stages(a.offsets[example + 1] - a.offsets[example]), 0};
      next_task += gridDim.x;
    } else if (next_task < tiles - a.shared) {
      task = {next_task, 0, a.examples, 0, a.stages, 0};
      next_task += kHopperWorkers;
    } else {
      if (stage >= end) return false;
      const std::int64_t tile = stage / a.stages, before = tile * a.stages, last = min(end, before + a.stages);
      task = {tiles - a.shared + tile,
              0,
              a.examples,
              stage - before,
              last - before,
              stage == first_stage(a, blockIdx.x) ? 0 : 1};
      stage = last;
    }
    return true;
  }
};

/// The rows of a task by examples. Those without rows or with factor 0 are passed over.
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

/// A value that all lanes have: tells the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

/// The stages in turn, and the parity of the phase of their barriers.
struct Ring {
  std::uint32_t base, stage = 0, phase = 0;

  __device__ explicit Ring(std::uint32_t shared) : base(shared) {}
  __device__ std::uint32_t data() const { return base + stage * kStageBytes; }
  __device__ std::uint32_t full() const { return base + kStages * kStageBytes + stage * 16; }
  __device__ std::uint32_t empty() const { return full() + 8; }
  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0, phase ^= 1;
  }
};

/// Copies a panel; columns and rows outside of the matrix are 0.
__device__ __forceinline__ void copy_panel(std::uint32_t to, const CUtensorMap& from, std::int64_t column,
                                           std::int64_t row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&from), "r"(static_cast<int>(column)), "r"(static_cast<int>(row)), "r"(barrier)
      : "memory");
}

/// A warp of consumers has read the stage of this barrier.
__device__ __forceinline__ void release(std::uint32_t empty) {
  if (threadIdx.x % kWarp == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

/// Rows [valid, kRows) of a stage belong to the next example: they become 0.
__device__ __forceinline__ void clear_rows(std::uint32_t stage, int valid) {
  const int of_panel = (kRows - valid) * 8;
  for (int i = static_cast<int>(threadIdx.x); i < (kPanelsG + kPanelsX) * of_panel; i += kConsumers)
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
__device__ __forceinline__ void produce(const Products& a, Ring ring) {
  for (Tasks<sums> tasks(a); tasks.next();) {
    const std::int64_t output = tasks.task.output(a), input = tasks.task.input(a);
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

/// Norms: of the tile, by warp. Squares in fp32 eight at a time: their error is far below kNormMargin, and conversions
/// to fp64 are slow.
__device__ __forceinline__ void store_squares(const Products& a, const Task& task, const float (&c)[kSums]) {
  double total = 0;
#pragma unroll
  for (int i = 0; i < kSums; i += 8) {
    float square = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) square += c[i + k] * c[i + k];
    total += static_cast<double>(square);
  }
  total = warp_sum(total);
  if (threadIdx.x % kWarp == 0)
    a.squares[(task.first * hopper_tiles(a.in, a.out) + task.tile) * kWarps + threadIdx.x / kWarp] = total;
}

/// to(row, column, at) for each pair of adjacent sums c[at], c[at + 1] of this thread, where they are in the tile.
template <class To>
__device__ __forceinline__ void for_pairs(const To& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kSums; i += 2) to(row + i / 2 % 2 * 8, column + i / 4 * 8, i);
}

__device__ __forceinline__ void store_sums(const Products& a, const Task& task, float scale, float (&c)[kSums]) {
  if (!task.whole(a)) {
    float* const part = a.parts + (2 * blockIdx.x + task.part) * kHopperOutputs * kHopperInputs;
    for_pairs([&](int row, int column, int i) {
      *reinterpret_cast<float2*>(part + row * kHopperInputs + column) = make_float2(scale * c[i], scale * c[i + 1]);
    });
    return;
  }
  const std::int64_t output = task.output(a), input = task.input(a);
  float* const sums = a.sums + output * a.stride + input;
  // Several reads in flight: the compiler would not move them across writes.
  constexpr int kAtOnce = 32;
  float2 before[kAtOnce / 2];
#pragma unroll
  for (int first = 0; first < kSums; first += kAtOnce) {
    for_pairs([&](int row, int column, int i) {
      if (i >= first && i < first + kAtOnce && output + row < a.out && input + column < a.in)
        before[(i - first) / 2] = *reinterpret_cast<const float2*>(sums + row * a.stride + column);
    });
    for_pairs([&](int row, int column, int i) {
      if (i >= first && i < first + kAtOnce && output + row < a.out && input + column < a.in)
        *reinterpret_cast<float2*>(sums + row * a.stride + column) =
            make_float2(before[(i - first) / 2].x + scale * c[i], before[(i - first) / 2].y + scale * c[i + 1]);
    });
  }
}

template <bool sums>
__device__ __forceinline__ void consume(const Products& a, Ring ring) {
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
__global__ void __launch_bounds__(kThreads, 1) form_products(const __grid_constant__ Products a) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // form_hopper_… refuse other GPUs
#else
  const std::uint32_t start = static_cast<std::uint32_t>(__cvta_generic_to_shared(hopper_shared)),
                      base = (start + kSwizzleAlignment - 1) / kSwizzleAlignment * kSwizzleAlignment;
  const Ring ring(base);
  if (threadIdx.x == 0) {
    Ring each = ring;
    for (int stage = 0; stage < kStages; ++stage, each.next()) {
      start_barrier(each.full(), 1);
      start_barrier(each.empty(), kWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kConsumers)
    consume<sums>(a, ring);
  else if (threadIdx.x == kConsumers)
    produce<sums>(a, ring);
#endif
}

constexpr int kAddedRows = 4;  ///< of a tile, by a block of kConsumers threads

/// Block (w, rows): the parts of the tile in which worker w is the second one.
__global__ void __launch_bounds__(kConsumers) add_parts_of_tiles(const __grid_constant__ Products a) {
  const std::int64_t worker = blockIdx.x + 1, at = first_stage(a, worker), tile = at / a.stages,
                     begin = tile * a.stages;
  if (at == begin || first_stage(a, worker - 1) > begin) return;
  const std::int64_t of_matrix = hopper_tiles(a.in, a.out) - a.shared + tile, across = hopper_across(a.in);
  constexpr int kFours = kHopperInputs / 4;
  const int row = static_cast<int>(blockIdx.y) * kAddedRows + static_cast<int>(threadIdx.x) / kFours,
            column = static_cast<int>(threadIdx.x) % kFours * 4;
  const std::int64_t output = of_matrix / across * kHopperOutputs + row,
                     input = of_matrix % across * kHopperInputs + column;
  if (output >= a.out || input >= a.in) return;
  float4 total{0.0f, 0.0f, 0.0f, 0.0f};
  for (std::int64_t w = worker - 1; w < kHopperWorkers && first_stage(a, w) < begin + a.stages; ++w) {
    if (first_stage(a, w) == first_stage(a, w + 1)) continue;
    const std::int64_t part = 2 * w + (first_stage(a, w) >= begin ? 0 : 1);
    const float4 value =
        *reinterpret_cast<const float4*>(a.parts + (part * kHopperOutputs + row) * kHopperInputs + column);
    total.x += value.x, total.y += value.y, total.z += value.z, total.w += value.w;
  }
  float2* const to = reinterpret_cast<float2*>(a.sums + output * a.stride + input);
  to[0] = make_float2(to[0].x + total.x, to[0].y + total.y);
  to[1] = make_float2(to[1].x + total.z, to[1].y + total.w);
}

/// The driver's function, without a link to the driver (kernels/driver_on_demand.cpp).
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
            "cuTensorMapEncodeTiled");
#else
    require(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
            "cuTensorMapEncodeTiled");
#endif
    if (found == nullptr || result != cudaDriverEntryPointSuccess)
      throw Error(ExitCode::internal, "the GPU driver has no cuTensorMapEncodeTiled (it is older than CUDA 12.0)");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

CUtensorMap panels_of(const TileMatrix& matrix, std::int64_t rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride) * 2};
  const cuuint32_t box[2] = {kPanelColumns, kRows}, steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult status =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<std::uint16_t*>(matrix.data), sizes,
                        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(ExitCode::internal, "products of examples: cuTensorMapEncodeTiled returned " + std::to_string(status));
  return map;
}

template <bool sums>
void launch(const Execution& execution, const Products& a, unsigned blocks) {
  static const bool once = [] {
    require(cudaFuncSetAttribute(form_products<sums>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "products of examples: shared memory");
    return true;
  }();
  static_cast<void>(once);
  form_products<sums><<<blocks, kThreads, kSharedBytes, stream_of(execution)>>>(a);
  require_launch("products of examples");
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
  launch<false>(execution, a, blocks_for(a.examples * hopper_tiles(a.in, a.out), 1, multiprocessors()));
}

void add_hopper_sums(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                     const float* factors, Matrix<float> out, float* parts) {
  if (examples.count() == 0) return;
  Products a = products_of(x, g, examples);
  a.factors = factors;
  for (std::int64_t e = 0; e < a.examples; ++e) a.stages += hopper_stages(examples.rows_of(e));
  a.shared = hopper_shared_tiles(hopper_tiles(a.in, a.out), a.stages);
  a.sums = out.data;
  a.stride = out.stride;
  a.parts = parts;
  launch<true>(execution, a, static_cast<unsigned>(kHopperWorkers));
  if (a.shared == 0) return;
  add_parts_of_tiles<<<dim3(static_cast<unsigned>(kHopperWorkers - 1), kHopperOutputs / kAddedRows), kConsumers, 0,
                       stream_of(execution)>>>(a);
  require_launch("parts of clipped sums");
}

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
//
// Norms and clipped sums of products (fused.hpp) on Hopper's warpgroup matrix instructions (PTX ISA, wgmma): a block
// forms tiles of 128 x 256 of G_bᵀ X_b, one after the other. Two warpgroups of consumers have 64 x 256 sums each in
// registers; one thread of a further warp requests the operands from the copy engine (cp.async.bulk.tensor). Both
// operands are read from shared memory as they lie in global memory, with the sum over their rows.
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
constexpr int kRows = 64, kStages = 4;
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
  std::int64_t groups;   // norms: examples; sums: parts of the examples
  std::int64_t least;    // examples of at most so many rows are left out
  double* parts;         // norms: [examples, hopper_tiles, kHopperWarps]
  const float* factors;  // sums: of the examples
  float* sums;           // sums: [groups, out * in], overwritten
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

extern __shared__ unsigned char hopper_shared[];

/// A tile of the examples [first, last).
template <bool sums>
struct Task {
  std::int64_t group, tile, first, last, output, input;

  __device__ Task(const Products& a, std::int64_t task) {
    const std::int64_t across = hopper_across(a.in), tiles = hopper_tiles(a.in, a.out);
    group = task / tiles, tile = task % tiles;
    first = sums ? a.examples * group / a.groups : group;
    last = sums ? a.examples * (group + 1) / a.groups : group + 1;
    output = tile / across * kHopperOutputs;
    input = tile % across * kHopperInputs;
  }
};

/// The examples of a task. Those without rows or with factor 0 are passed over.
struct ExamplesOf {
  const Products& a;
  std::int64_t example, last;
  std::int64_t row = 0;
  int rows = 0;
  float factor = 1;

  __device__ ExamplesOf(const Products& products, std::int64_t first, std::int64_t last_)
      : a(products), example(first), last(last_) {
    find();
  }
  __device__ bool valid() const { return example < last; }
  __device__ int stages() const { return (rows + kRows - 1) / kRows; }
  __device__ void find() {
    for (; example < last; ++example) {
      row = a.offsets[example];
      const std::int64_t count = a.offsets[example + 1] - row;
      if (a.factors != nullptr) factor = a.factors[example];
      rows = static_cast<int>(count);
      if (count > a.least && count > 0 && factor >= kLeastFactor) return;
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
__device__ __forceinline__ void produce(const Products& a, Ring ring, std::int64_t tasks) {
  for (std::int64_t t = blockIdx.x; t < tasks; t += gridDim.x) {
    const Task<sums> task(a, t);
    for (ExamplesOf each(a, task.first, task.last); each.valid(); each.next())
      for (int i = 0; i < each.rows; i += kRows, ring.next()) {
        wait_barrier(ring.empty(), ring.phase ^ 1);
        expect_bytes(ring.full(), kStageBytes);
#pragma unroll
        for (int p = 0; p < kPanelsG; ++p)
          copy_panel(ring.data() + p * kPanelBytes, a.g, task.output + p * kPanelColumns, each.row + i, ring.full());
#pragma unroll
        for (int p = 0; p < kPanelsX; ++p)
          copy_panel(ring.data() + (kPanelsG + p) * kPanelBytes, a.x, task.input + p * kPanelColumns, each.row + i,
                     ring.full());
      }
  }
}

/// Norms: of the tile, by warp. Squares in fp32 eight at a time: their error is far below kNormMargin, and conversions
/// to fp64 are slow.
__device__ __forceinline__ void store_squares(const Products& a, std::int64_t group, std::int64_t tile,
                                              const float (&c)[kSums]) {
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
    a.parts[(group * hopper_tiles(a.in, a.out) + tile) * kWarps + threadIdx.x / kWarp] = total;
}

/// c[i]: row lane / 4 + 8 (i / 2 % 2) of the 16 of a warp, column 2 (lane % 4) + 8 (i / 4) + i % 2.
__device__ __forceinline__ void store_sums(const Products& a, std::int64_t group, std::int64_t output,
                                           std::int64_t input, float scale, const float (&c)[kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row = output + static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4,
                     column = input + lane % 4 * 2;
  float* const to = a.sums + group * a.out * a.in;
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const std::int64_t r = row + i / 2 % 2 * 8, j = column + i / 4 * 8;
    if (r < a.out && j < a.in)
      *reinterpret_cast<float2*>(to + r * a.in + j) = make_float2(scale * c[i], scale * c[i + 1]);
  }
}

template <bool sums>
__device__ __forceinline__ void consume(const Products& a, Ring ring, std::int64_t tasks) {
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  const std::uint64_t of_g = operand_at(ring.base + warpgroup * kPanelBytes, kPanelBytes),
                      of_x = operand_at(ring.base + kPanelsG * kPanelBytes, kPanelBytes);
  for (std::int64_t t = blockIdx.x; t < tasks; t += gridDim.x) {
    const Task<sums> task(a, t);
    float c[kSums] = {};
    float scale = 0.0f;  // sums: c is the sum so far divided by it
    for (ExamplesOf each(a, task.first, task.last); each.valid(); each.next()) {
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
      store_sums(a, task.group, task.output, task.input, scale, c);
    else
      store_squares(a, task.group, task.tile, c);
  }
}

#endif

/// Block n has tile `task` % tiles of example (norms) or slice of the examples (sums) `task` / tiles, for task = n, n +
/// blocks, …
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
  const std::int64_t tasks = a.groups * hopper_tiles(a.in, a.out);
  if (threadIdx.x < kConsumers)
    consume<sums>(a, ring, tasks);
  else if (threadIdx.x == kConsumers)
    produce<sums>(a, ring, tasks);
#endif
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
void launch(const Execution& execution, const Products& a) {
  static const bool once = [] {
    require(cudaFuncSetAttribute(form_products<sums>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "products of examples: shared memory");
    return true;
  }();
  static_cast<void>(once);
  const unsigned blocks = blocks_for(a.groups * hopper_tiles(a.in, a.out), 1, multiprocessors());
  form_products<sums><<<blocks, kThreads, kSharedBytes, stream_of(execution)>>>(a);
  require_launch("products of examples");
}

}  // namespace

bool has_hopper_products() { return is_hopper(); }

void form_hopper_norms(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                       std::int64_t least, double* parts) {
  if (examples.count() == 0) return;
  const Products a{.x = panels_of(x, examples.offsets.back()),
                   .g = panels_of(g, examples.offsets.back()),
                   .in = x.columns,
                   .out = g.columns,
                   .offsets = examples.device_offsets.data,
                   .examples = examples.count(),
                   .groups = examples.count(),
                   .least = least,
                   .parts = parts,
                   .factors = nullptr,
                   .sums = nullptr};
  launch<false>(execution, a);
}

void form_hopper_sums(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                      const float* factors, std::int64_t slices, float* sums) {
  if (examples.count() == 0) return;
  const Products a{.x = panels_of(x, examples.offsets.back()),
                   .g = panels_of(g, examples.offsets.back()),
                   .in = x.columns,
                   .out = g.columns,
                   .offsets = examples.device_offsets.data,
                   .examples = examples.count(),
                   .groups = slices,
                   .least = 0,
                   .parts = nullptr,
                   .factors = factors,
                   .sums = sums};
  launch<true>(execution, a);
}

}  // namespace weft::kernels::cuda

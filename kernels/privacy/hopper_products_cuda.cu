// SPDX-License-Identifier: Apache-2.0
//
// Norms and clipped sums of products (fused.hpp) on Hopper's warpgroup matrix instructions (PTX ISA, wgmma): a block of
// two warpgroups forms a tile of 128 x 256 of G_bᵀ X_b; each warpgroup has 64 x 256 sums in registers. Both operands
// are read from shared memory as they lie in global memory, with the sum over their rows.
//
//   shared memory   kStages stages of kRows rows; panels of 64 columns (128 bytes per row), swizzled over 128 bytes
//   step            wait for the copies of this stage; start its products; request the rows two steps ahead; wait for
//                   the products of the step before. One barrier per step: the stage that is overwritten was read two
//                   steps before, and every warpgroup has waited for those products when it passes the barrier.
//
// Limit: the copies from the L2 cache, 48 KB for 2 x 128 x 256 x 64 operations. Not measured.
#include "kernels/privacy/hopper_products.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kRows = 64, kStages = 4, kAhead = 2;
constexpr int kPanelColumns = 64, kPanelBytes = kRows * kPanelColumns * 2;
constexpr int kPanelsG = kHopperOutputs / kPanelColumns, kPanelsX = kHopperInputs / kPanelColumns;
constexpr int kStageBytes = (kPanelsG + kPanelsX) * kPanelBytes;
constexpr int kSwizzleAlignment = 1024;
constexpr int kSharedBytes = kStages * kStageBytes + kSwizzleAlignment;
constexpr int kSums = kHopperInputs / 2;  // of a thread: 64 x 256 sums of 128 threads
static_assert(kStages >= kAhead + 2 && kSharedBytes <= 227 * 1024);

struct Products {
  TileMatrix x, g;
  const std::int64_t* offsets;
  std::int64_t least;     // examples of at most so many rows are left out
  double* parts;          // norms: [examples, tiles of 128 x 128]
  const float* factors;   // sums: of the examples
  std::int64_t examples;  // sums
  std::int64_t slices;    // sums: parts of the examples
  float* sums;            // sums: [slices, out * in], overwritten
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

extern __shared__ unsigned char hopper_shared[];

/// Where a block is in the rows of its examples. Examples without rows or with factor 0 are passed over.
struct Cursor {
  const Products& a;
  std::int64_t example, last;
  std::int64_t row, end;

  __device__ Cursor(const Products& products, std::int64_t first, std::int64_t last_)
      : a(products), example(first), last(last_), row(0), end(0) {
    find();
  }
  __device__ bool valid() const { return example < last; }
  __device__ void find() {
    for (; example < last; ++example) {
      row = a.offsets[example], end = a.offsets[example + 1];
      if (end - row > a.least && end > row && (a.factors == nullptr || a.factors[example] >= kLeastFactor)) return;
    }
  }
  __device__ void next() {
    row += kRows;
    if (row < end) return;
    ++example;
    find();
  }
};

/// Copies rows [row, row + kRows) of the columns of the tile; those beyond the ends are 0.
__device__ __forceinline__ void request(const Products& a, std::uint32_t stage, std::int64_t row, std::int64_t end,
                                        std::int64_t output, std::int64_t input) {
  const int chunk = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
  for (int panel = 0; panel < kPanelsG + kPanelsX; ++panel) {
    const bool is_g = panel < kPanelsG;
    const TileMatrix& matrix = is_g ? a.g : a.x;
    const std::int64_t column =
        (is_g ? output + panel * kPanelColumns : input + (panel - kPanelsG) * kPanelColumns) + chunk * 8;
#pragma unroll
    for (int half = 0; half < kRows * 8 / kThreads; ++half) {
      const int r = half * (kThreads / 8) + static_cast<int>(threadIdx.x) / 8;
      const bool valid = row + r < end && column < matrix.columns;
      const int bytes = !valid ? 0 : matrix.columns - column < 8 ? static_cast<int>(matrix.columns - column) * 2 : 16;
      const std::uint16_t* from = matrix.data + (valid ? (row + r) * matrix.stride + column : 0);
      const std::uint32_t to = stage + panel * kPanelBytes + r * 128 + ((chunk ^ (r & 7)) * 16);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    }
  }
}

/// Of an operand whose contiguous axis is that of the result (PTX ISA, matrix descriptor): swizzle of 128 bytes, 1024
/// bytes from eight rows of the sum to the next eight, kPanelBytes from 64 columns to the next.
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | static_cast<std::uint64_t>(kPanelBytes >> 4) << 16 |
         static_cast<std::uint64_t>(1024 >> 4) << 32 | std::uint64_t{1} << 62;
}
constexpr std::uint64_t kSixteenRows = 16 * 128 >> 4;  // in a descriptor

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/// The sums may be read and written from here on, or no longer.
__device__ __forceinline__ void fence_sums(float (&c)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// clang-format off
#define WEFT_SUMS_8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define WEFT_SUMS_32(c, i) WEFT_SUMS_8(c, i), WEFT_SUMS_8(c, i + 8), WEFT_SUMS_8(c, i + 16), WEFT_SUMS_8(c, i + 24)
// clang-format on

/// c += 16 rows of `g` (64 columns), transposed, times 16 rows of `x` (256 columns).
__device__ __forceinline__ void multiply(float (&c)[kSums], std::uint64_t g, std::uint64_t x) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
      " %128, %129, adds, 1, 1, 1, 1;\n}"
      : WEFT_SUMS_32(c, 0), WEFT_SUMS_32(c, 32), WEFT_SUMS_32(c, 64), WEFT_SUMS_32(c, 96)
      : "l"(g), "l"(x)
      : "memory");
}
#undef WEFT_SUMS_32
#undef WEFT_SUMS_8

/// Sum over the block in a fixed order, on thread 0.
__device__ __forceinline__ double block_sum(double value, double* part) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (int w = 0; w < kWarps; ++w) total += part[w];
  return total;
}

#endif

/// Block `blockIdx.x` % tiles of example (norms) or slice of the examples (sums) `blockIdx.x` / tiles.
template <bool sums>
__global__ void __launch_bounds__(kThreads, 1) form_products(const __grid_constant__ Products a) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // form_hopper_… refuse other GPUs
#else
  const std::int64_t across = hopper_across(a.x.columns), tiles = across * tiles_of(a.g.columns);
  const std::int64_t task = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const std::int64_t output = tile / across * kHopperOutputs, input = tile % across * kHopperInputs;
  const std::int64_t first = sums ? a.examples * task / a.slices : task,
                     last = sums ? a.examples * (task + 1) / a.slices : task + 1;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const std::uint32_t base =
      (static_cast<std::uint32_t>(__cvta_generic_to_shared(hopper_shared)) + kSwizzleAlignment - 1) /
      kSwizzleAlignment * kSwizzleAlignment;
  float c[kSums] = {};
  float scale = 0.0f;  // sums: c is the sum so far divided by it

  Cursor load(a, first, last), use(a, first, last);
  int load_stage = 0, use_stage = 0;
  const auto request_next = [&] {
    if (load.valid()) {
      request(a, base + load_stage * kStageBytes, load.row, load.end, output, input);
      load.next();
    }
    commit_copies();
    load_stage = (load_stage + 1) % kStages;
  };
  for (int i = 0; i < kAhead; ++i) request_next();
  while (use.valid()) {
    const std::int64_t example = use.example;
    if constexpr (sums) {
      const float factor = a.factors[example], ratio = scale == 0.0f ? 0.0f : scale / factor;
#pragma unroll
      for (int i = 0; i < kSums; ++i) c[i] *= ratio;
      scale = factor;
    }
    fence_sums(c);
    for (; use.valid() && use.example == example; use.next()) {
      wait_copies<kAhead - 1>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read what the copies wrote
      __syncthreads();
      const std::uint32_t stage = base + use_stage * kStageBytes;
      const std::uint64_t of_g = descriptor(stage + warpgroup * kPanelBytes),
                          of_x = descriptor(stage + kPanelsG * kPanelBytes);
      begin_products();
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) multiply(c, of_g + k * kSixteenRows, of_x + k * kSixteenRows);
      commit_products();
      request_next();
      wait_products<1>();
      use_stage = (use_stage + 1) % kStages;
    }
    wait_products<0>();
    fence_sums(c);
  }
  wait_copies<0>();

  // c[i]: row lane / 4 + 8 (i / 2 % 2) of the 16 of a warp, column 2 (lane % 4) + 8 (i / 4) + i % 2.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if constexpr (sums) {
    const std::int64_t row = output + static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4,
                       column = input + lane % 4 * 2;
    float* const to = a.sums + task * a.g.columns * a.x.columns;
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      const std::int64_t r = row + i / 2 % 2 * 8, j = column + i / 4 * 8;
      if (r < a.g.columns && j < a.x.columns)
        *reinterpret_cast<float2*>(to + r * a.x.columns + j) = make_float2(scale * c[i], scale * c[i + 1]);
    }
  } else {
    // Tiles of parts are 128 columns wide. Squares in fp32 eight at a time: their error is far below kNormMargin, and
    // conversions to fp64 are slow.
    __shared__ double part[2][kWarps];
    const std::int64_t narrow = tiles_of(a.x.columns);
    double* const to = a.parts + (task * tiles_of(a.g.columns) + tile / across) * narrow + tile % across * 2;
    double total[2] = {};
#pragma unroll
    for (int i = 0; i < kSums; i += 8) {
      float square = 0.0f;
#pragma unroll
      for (int k = 0; k < 8; ++k) square += c[i + k] * c[i + k];
      total[2 * i / kSums] += static_cast<double>(square);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const double sum = block_sum(total[half], part[half]);
      if (threadIdx.x == 0 && tile % across * 2 + half < narrow) to[half] = sum;
    }
  }
#endif
}

template <bool sums>
void launch(const Execution& execution, std::int64_t blocks, const Products& a) {
  static const bool once = [] {
    require(cudaFuncSetAttribute(form_products<sums>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "products of examples: shared memory");
    return true;
  }();
  static_cast<void>(once);
  if (blocks == 0) return;
  form_products<sums><<<static_cast<unsigned>(blocks), kThreads, kSharedBytes, stream_of(execution)>>>(a);
  require_launch("products of examples");
}

}  // namespace

bool has_hopper_products() {
  static const bool found = [] {
    int device = 0, major = 0, minor = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return major == 9 && minor == 0;
  }();
  return found;
}

void form_hopper_norms(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                       std::int64_t least, double* parts) {
  launch<false>(execution, examples.count() * tiles_of(g.columns) * hopper_across(x.columns),
                {.x = x, .g = g, .offsets = examples.device_offsets.data, .least = least, .parts = parts});
}

void form_hopper_sums(const Execution& execution, const TileMatrix& x, const TileMatrix& g, const Examples& examples,
                      const float* factors, std::int64_t slices, float* sums) {
  launch<true>(execution, slices * tiles_of(g.columns) * hopper_across(x.columns),
               {.x = x,
                .g = g,
                .offsets = examples.device_offsets.data,
                .factors = factors,
                .examples = examples.count(),
                .slices = slices,
                .sums = sums});
}

}  // namespace weft::kernels::cuda

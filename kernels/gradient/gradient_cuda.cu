// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Column sums read each element of their matrices once (2 bytes in bf16); a block of 8 warps sums
// kRowsPerSum rows of 256 columns, and the sums of the blocks are 1/64 of the traffic. Few rows of fp32, partial sums
// of another kernel, are added in one launch. Rows by id read each gradient row once; every run of equal ids reads and
// writes a row of the table; the sort moves 16 bytes per row and pass.
#include "kernels/gradient/gradient.hpp"
#include "kernels/gradient/rows_by_id.hpp"
#include "kernels/matrix_cuda.cuh"
#include "kernels/scan_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kSumWarps = 8;  // warps of a block that sums kRowsPerSum rows
constexpr int kSumThreads = kSumWarps * kWarp;

struct Columns {
  AnyMatrix x, g;  // x without data: sums of g
  const float *shift, *scale;
  float* sums;  // [row_sums(rows), columns]
};

/// Block (b, c): rows of block b; warp w takes rows w, w + kSumWarps, ...; lanes have kWidth columns each.
template <int kWidth>
__global__ void __launch_bounds__(kSumThreads) sum_blocks(const __grid_constant__ Columns a) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kWarp + lane) * kWidth;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kRowsPerSum;
  const std::int64_t end = min(begin + kRowsPerSum, a.g.rows);
  float sum[kWidth] = {};
  if (column < a.g.columns) {
#pragma unroll 4
    for (std::int64_t row = begin + warp; row < end; row += kSumWarps) {
      float g[kWidth];
      load_columns(a.g, row, column, g);
      if (a.x.data != nullptr) {
        float x[kWidth];
        load_columns(a.x, row, column, x);
        const float shift = a.shift == nullptr ? 0.0f : a.shift[row], scale = a.scale == nullptr ? 1.0f : a.scale[row];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) g[i] *= (x[i] - shift) * scale;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += g[i];
    }
  }
  __shared__ float part[kSumWarps][kWarp * kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) part[warp][lane * kWidth + i] = sum[i];
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kWarp * kWidth;
  for (int c = static_cast<int>(threadIdx.x); c < kWarp * kWidth && first + c < a.g.columns; c += kSumThreads) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kSumWarps; ++w) total += part[w][c];
    a.sums[blockIdx.x * a.g.columns + first + c] = total;
  }
}

/// Rows that are added in one stage where they are fp32, such as partial sums.
constexpr std::int64_t kFewRows = 1024;

/// out[j] (+)= sum over blocks of sums[b, j]: a block has 32 columns, warp w takes blocks w, w + 32, ...
__global__ void __launch_bounds__(1024) add_blocks(const float* sums, std::int64_t blocks, std::int64_t columns,
                                                   std::int64_t stride, bool overwrite, float* out) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t b = warp; b < blocks; b += kWarp) sum += sums[b * stride + column];
  }
  __shared__ float part[kWarp][kWarp];
  part[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarp; ++w) total += part[w][lane];
  out[column] = overwrite ? total : out[column] + total;
}

void add_columns(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                 Array<const float> scale, Array<float> out, bool overwrite, Array<std::byte> workspace) {
  if (g.rows == 0 || g.columns == 0) return;
  const cudaStream_t queue = stream_of(execution);
  const unsigned adding = blocks_for(g.columns, kWarp);
  if (x.data == nullptr && g.type == Scalar::fp32 && g.rows <= kFewRows) {
    add_blocks<<<adding, 1024, 0, queue>>>(static_cast<const float*>(g.data), g.rows, g.columns, g.stride, overwrite,
                                           out.data);
    return require_launch("gradient: column sums");
  }
  const Columns a{x, g, shift.data, scale.data, reinterpret_cast<float*>(workspace.data)};
  const unsigned blocks = static_cast<unsigned>(row_sums(g.rows));
  if (g.columns % 8 == 0 && has_vectors(g) && (x.data == nullptr || has_vectors(x)))
    sum_blocks<8><<<dim3(blocks, blocks_for(g.columns, kWarp * 8)), kSumThreads, 0, queue>>>(a);
  else
    sum_blocks<1><<<dim3(blocks, blocks_for(g.columns, kWarp)), kSumThreads, 0, queue>>>(a);
  add_blocks<<<adding, 1024, 0, queue>>>(a.sums, blocks, g.columns, g.columns, overwrite, out.data);
  require_launch("gradient: column sums");
}

// The sort: a block has kSortBlock threads, one row each.

__global__ void table_rows(const std::uint32_t* ids, std::int64_t n, std::int64_t first_row, std::int64_t rows,
                           SortedRow* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = {table_row(ids[i], first_row, rows), static_cast<std::uint32_t>(i)};
}

__global__ void __launch_bounds__(kSortBlock)
    count_digits(const SortedRow* from, std::int64_t n, int pass, std::int32_t* places) {
  __shared__ std::int32_t count[kDigits];
  if (threadIdx.x < kDigits) count[threadIdx.x] = 0;
  __syncthreads();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kSortBlock + threadIdx.x;
  if (i < n) atomicAdd(count + digit_of(from[i].id, pass), 1);
  __syncthreads();
  if (threadIdx.x < kDigits)
    places[static_cast<std::int64_t>(threadIdx.x) * gridDim.x + blockIdx.x] = count[threadIdx.x];
}

/// Moves the rows of a block to their places, rows of one digit in their order: within a warp by lane, then by warp.
__global__ void __launch_bounds__(kSortBlock)
    move_rows(const SortedRow* from, std::int64_t n, int pass, const std::int32_t* places, SortedRow* to) {
  constexpr int kWarps = kSortBlock / kWarp;
  __shared__ std::int32_t before[kWarps][kDigits];
  const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
  for (int digit = lane; digit < kDigits; digit += kWarp) before[warp][digit] = 0;
  __syncwarp();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kSortBlock + threadIdx.x;
  const SortedRow row = i < n ? from[i] : SortedRow{};
  const int digit = i < n ? digit_of(row.id, pass) : kDigits;  // beyond the end: an additional digit
  const unsigned same = __match_any_sync(kAllLanes, digit);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (i < n && rank == 0) before[warp][digit] = __popc(same);
  __syncthreads();
  if (threadIdx.x < kDigits) {
    std::int32_t place = places[static_cast<std::int64_t>(threadIdx.x) * gridDim.x + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const std::int32_t count = before[w][threadIdx.x];
      before[w][threadIdx.x] = place;
      place += count;
    }
  }
  __syncthreads();
  if (i < n) to[before[warp][digit] + rank] = row;
}

struct Runs {
  Array<const SortedRow> sorted;
  AnyMatrix g, out, leading, inner;  // all but g fp32
};

template <int kWidth>
__device__ __forceinline__ void add_to_row(const AnyMatrix& out, std::int64_t row, std::int64_t column,
                                           const float (&sum)[kWidth]) {
  float value[kWidth];
  load_columns(out, row, column, value);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] += sum[i];
  store_columns(out, row, column, value);
}

/// Step 2 of rows_by_id.hpp. One warp per (block of kRowsPerSum sorted rows, chunk of 32 kWidth columns). Rows are
/// loaded four at a time, whatever runs they belong to.
template <int kWidth>
__global__ void __launch_bounds__(kWarp) sum_segments(const __grid_constant__ Runs a) {
  constexpr int kAhead = 4;
  const std::int64_t n = a.sorted.size, block = blockIdx.x;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kWarp + threadIdx.x) * kWidth;
  if (column >= a.out.columns) return;
  const std::int64_t block_begin = block * kRowsPerSum, block_end = min(block_begin + kRowsPerSum, n);
  std::int64_t begin = run_begin(a.sorted, block_begin);  // first row of the run
  std::int64_t segment = next_segment(begin, block_begin);
  if (!same_run(a.sorted, begin, segment)) begin = segment = run_end(a.sorted, begin);
  if (segment >= block_end) return;
  std::uint32_t id = a.sorted[segment].id;
  float sum[kWidth] = {};
  const auto finish = [&](bool run_goes_on) {
    if (segment > begin)
      store_columns(a.inner, block, column, sum);
    else if (run_goes_on)
      store_columns(a.leading, block, column, sum);
    else
      add_to_row(a.out, id, column, sum);
  };
  for (std::int64_t first = segment; id != a.out.rows; first += kAhead) {
    SortedRow row[kAhead];
    float g[kAhead][kWidth];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      row[k] = first + k < n ? a.sorted[first + k] : SortedRow{static_cast<std::uint32_t>(a.out.rows), 0};
      if (row[k].id != a.out.rows) load_columns(a.g, row[k].row, column, g[k]);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const std::int64_t at = first + k;
      const bool goes_on = row[k].id == id;
      if (at > segment && (!goes_on || at == segment + kRowsPerSum)) {
        finish(goes_on);
        if (at >= block_end || row[k].id == a.out.rows) return;  // ids of other ranks come last
        if (!goes_on) begin = at;
        segment = at;
        id = row[k].id;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += g[k][i];
    }
  }
}

/// Step 3: one warp per (block, chunk).
template <int kWidth>
__global__ void __launch_bounds__(kWarp) sum_runs(const __grid_constant__ Runs a) {
  const std::int64_t n = a.sorted.size, block = blockIdx.x;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.y) * kWarp + threadIdx.x) * kWidth;
  if (column >= a.out.columns) return;
  const std::int64_t last = min((block + 1) * kRowsPerSum, n) - 1, begin = run_begin(a.sorted, last);
  const std::uint32_t id = a.sorted[last].id;
  if (id == a.out.rows || begin < block * kRowsPerSum) return;
  const std::int64_t segments = row_sums(run_end(a.sorted, last) - begin);
  if (segments == 1) return;
  float sum[kWidth];
  load_columns(a.leading, block, column, sum);
#pragma unroll 4
  for (std::int64_t k = 1; k < segments; ++k) {
    float inner[kWidth];
    load_columns(a.inner, block + k, column, inner);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += inner[i];
  }
  add_to_row(a.out, id, column, sum);
}

template <int kWidth>
void sum_sorted(cudaStream_t queue, const Runs& a) {
  const dim3 grid(static_cast<unsigned>(row_sums(a.sorted.size)), blocks_for(a.out.columns, kWarp * kWidth));
  sum_segments<kWidth><<<grid, kWarp, 0, queue>>>(a);
  sum_runs<kWidth><<<grid, kWarp, 0, queue>>>(a);
}

}  // namespace

void add_column_sums(const Execution& execution, AnyMatrix g, Array<float> out, bool overwrite,
                     Array<std::byte> workspace) {
  add_columns(execution, {}, g, {}, {}, out, overwrite, workspace);
}

void add_column_products(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                         Array<const float> scale, Array<float> out, bool overwrite, Array<std::byte> workspace) {
  add_columns(execution, x, g, shift, scale, out, overwrite, workspace);
}

void sort_rows_by_id(const Execution& execution, RowsByIdWorkspace& w, std::int64_t largest_id) {
  const std::int64_t n = w.from.size;
  const cudaStream_t queue = stream_of(execution);
  const unsigned blocks = blocks_for(n, kSortBlock);
  for (int pass = 0; pass < sort_passes(largest_id); ++pass) {
    count_digits<<<blocks, kSortBlock, 0, queue>>>(w.from.data, n, pass, w.places.data);
    scan_in_one_block<<<1, kScanThreads, 0, queue>>>(w.places.data, std::int64_t{kDigits} * blocks);
    move_rows<<<blocks, kSortBlock, 0, queue>>>(w.from.data, n, pass, w.places.data, w.to.data);
    std::swap(w.from, w.to);
  }
  require_launch("sort_rows_by_id");
}

void add_rows_by_id(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                    Matrix<float> out, Array<std::byte> workspace) {
  const std::int64_t n = ids.size;
  RowsByIdWorkspace w = rows_by_id_layout(workspace.data, n, out.columns);
  if (n == 0 || out.columns == 0) return;
  const cudaStream_t queue = stream_of(execution);
  table_rows<<<blocks_for(n, kSortBlock), kSortBlock, 0, queue>>>(ids.data, n, first_row, out.rows, w.from.data);
  cuda::sort_rows_by_id(execution, w, out.rows);
  const auto sums = [&](float* data) { return AnyMatrix{data, Scalar::fp32, row_sums(n), out.columns, out.columns}; };
  const Runs a{
      w.from, g, {out.data, Scalar::fp32, out.rows, out.columns, out.stride}, sums(w.leading.data), sums(w.inner.data)};
  if (out.columns % 8 == 0 && has_vectors(g) && has_vectors(a.out))
    sum_sorted<8>(queue, a);
  else
    sum_sorted<1>(queue, a);
  require_launch("add_rows_by_id");
}

}  // namespace weft::kernels::cuda

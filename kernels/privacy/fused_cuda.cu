// SPDX-License-Identifier: Apache-2.0
//
// Limit: mma.sync, as in attention_cuda.cu. One block of 256 threads per tile of 128 x 128; a block reads 64 KB of rows
// for 2 x 128 x 128 x 128 operations, and neighbouring blocks of an example share them in the L2 cache. Reached
// on an H200 by Gram norms: 150 to 265 TFLOP/s (hopper_gram_cuda.cu: 380 to 620).
#include "kernels/language/attention/flash_context_cuda.cuh"
#include "kernels/privacy/fused.hpp"

namespace weft::kernels::cuda {
namespace {

enum class Work { direct, gram, weighed };

template <Work work>
struct ArgumentsOf;
template <>
struct ArgumentsOf<Work::direct> {
  using type = DirectTiles;
};
template <>
struct ArgumentsOf<Work::gram> {
  using type = GramPairs;
};
template <>
struct ArgumentsOf<Work::weighed> {
  using type = WeighedTiles;
};

template <class Number, Work work>
__global__ void __launch_bounds__(kTileThreads)
    form_tiles(const __grid_constant__ typename ArgumentsOf<work>::type arguments) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime rejects these GPUs
#else
  DeviceContext<Number> context;
  if constexpr (work == Work::direct)
    form_direct_tile(context, arguments, blockIdx.x);
  else if constexpr (work == Work::gram)
    form_gram_pair(context, arguments, blockIdx.x);
  else
    form_weighed_tile(context, arguments, blockIdx.x);
#endif
}

template <class Number, Work work>
void launch_as(const Execution& execution, std::int64_t tasks, const typename ArgumentsOf<work>::type& arguments) {
  constexpr int kBytes = work == Work::gram ? kColumnProductShared : kRowProductShared;
  static_assert(kBytes <= kDynamicSharedMemory);
  allow_shared_memory(reinterpret_cast<const void*>(form_tiles<Number, work>), kBytes, "products of examples");
  if (tasks == 0) return;
  form_tiles<Number, work><<<static_cast<unsigned>(tasks), kTileThreads, kBytes, stream_of(execution)>>>(arguments);
  require_launch("products of examples");
}

template <Work work>
void launch(const Execution& execution, Scalar type, std::int64_t tasks,
            const typename ArgumentsOf<work>::type& arguments) {
  if (type == Scalar::bf16)
    launch_as<bf16, work>(execution, tasks, arguments);
  else
    launch_as<half, work>(execution, tasks, arguments);
}

bool fits(const AnyMatrix& matrix) {
  return (matrix.type == Scalar::bf16 || matrix.type == Scalar::fp16) && matrix.columns % 8 == 0 &&
         matrix.stride % 8 == 0 && is_aligned(matrix.data, 16);
}
/// True if the kernels take the operands and the number of tasks is a valid number of blocks.
bool fits(const AnyMatrix& x, const AnyMatrix& g, std::int64_t tasks) {
  return x.type == g.type && fits(x) && fits(g) && tasks < std::int64_t{1} << 31;
}

TileMatrix tiles(const AnyMatrix& matrix) {
  return {static_cast<const std::uint16_t*>(matrix.data), matrix.columns, matrix.stride};
}

/// True for rows that the kernels of hopper_products_cuda.cu take: G with any number of columns.
bool fits_hopper(const AnyMatrix& x, const AnyMatrix& g, const Examples& examples) {
  return x.type == Scalar::bf16 && g.type == Scalar::bf16 && fits(x) && g.stride % 8 == 0 && is_aligned(g.data, 16) &&
         x.columns > 0 && g.columns > 0 && examples.count() > 0 && examples.offsets.back() > 0 && has_hopper_products();
}

/// True for sums that those kernels add to.
bool takes_pairs(const Matrix<float>& out) { return out.stride % 2 == 0 && is_aligned(out.data, 8); }

/// out[i] += sum over slices of sums[s, i], in order.
__global__ void add_slices(const float* sums, std::int64_t slices, Matrix<float> out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t size = out.rows * out.columns;
  if (i >= size) return;
  float total = 0.0f;
  for (std::int64_t s = 0; s < slices; ++s) total += sums[s * size + i];
  out(i / out.columns, i % out.columns) += total;
}

}  // namespace

bool form_fused_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                      std::int64_t least, Array<double> norms, Array<double> parts) {
  if (fits_hopper(x, g, examples)) {
    form_hopper_norms(execution, tiles(x), tiles(g), examples, least, parts.data);
    kernels::add_parts(execution, hopper_tiles(x.columns, g.columns) * kHopperWarps, 1, norms, parts);
    return true;
  }
  const std::int64_t of_one = tiles_of(x.columns) * tiles_of(g.columns), tasks = examples.count() * of_one;
  if (!fits(x, g, tasks)) return false;
  launch<Work::direct>(execution, x.type, tasks, {tiles(x), tiles(g), examples.device_offsets.data, least, parts.data});
  kernels::add_parts(execution, of_one, 1, norms, parts);
  return true;
}

bool form_fused_gram(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples, std::int64_t least,
                     double error, Array<double> norms, Array<double> parts) {
  const std::int64_t side = tiles_of(examples.most_rows()), pairs = gram_pairs(side), tasks = examples.count() * pairs;
  if (fits_hopper(x, g, examples)) {
    form_hopper_gram(execution, tiles(x), tiles(g), examples, least, error, parts.data);
    kernels::add_parts(execution, pairs * kHopperWarps, 1, norms, parts);
    return true;
  }
  if (!fits(x, g, tasks)) return false;
  launch<Work::gram>(execution, x.type, tasks,
                     {tiles(x), tiles(g), examples.device_offsets.data, least, side, error, parts.data});
  kernels::add_parts(execution, pairs, 1, norms, parts);
  return true;
}

bool add_fused_product(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                       Array<const float> factors, Matrix<float> out, Array<float> sums) {
  if (takes_pairs(out) && fits_hopper(x, g, examples)) {
    add_hopper_sums(execution, tiles(x), tiles(g), examples, factors.data, out, sums.data);
    return true;
  }
  const std::int64_t slices = weighed_slices(x.columns, g.columns, examples.count()),
                     tasks = slices * tiles_of(x.columns) * tiles_of(g.columns);
  if (!fits(x, g, tasks)) return false;
  launch<Work::weighed>(
      execution, x.type, tasks,
      {tiles(x), tiles(g), examples.device_offsets.data, examples.count(), factors.data, slices, sums.data});
  const std::int64_t size = out.rows * out.columns;
  if (size == 0) return true;
  add_slices<<<blocks_for(size, 256), 256, 0, stream_of(execution)>>>(sums.data, slices, out);
  require_launch("clipped sum of products");
  return true;
}

}  // namespace weft::kernels::cuda

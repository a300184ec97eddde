// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores: one block of 128 threads per 64 or 128 rows (flash.hpp). 193 to 255 registers per thread,
// so two blocks per multiprocessor; shared memory allows three. Limit: mma.sync, which does not reach the rate of
// Hopper's wgmma; then exp2 and the reads of fragments.
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/flash.hpp"
#include "kernels/language/attention/flash_context_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

enum class Pass { forward, queries, keys };

template <class Number, int kHead, Pass pass>
__global__ void __launch_bounds__(kFlashThreads) flash(const __grid_constant__ FlashArguments arguments) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime rejects these GPUs
#else
  using Sizes = FlashSizes<kHead>;
  DeviceContext<Number> context;
  if constexpr (pass == Pass::forward)
    flash_forward<kHead, Sizes::forward_row_tiles, Sizes::forward_tile>(context, arguments, blockIdx.x);
  else if constexpr (pass == Pass::queries)
    flash_queries_backward<kHead, Sizes::queries_row_tiles, Sizes::queries_tile>(context, arguments, blockIdx.x);
  else
    flash_keys_backward<kHead, Sizes::keys_row_tiles, Sizes::keys_tile>(context, arguments, blockIdx.x);
#endif
}

template <class Number, int kHead, Pass pass>
void launch(const Execution& execution, const FlashArguments& arguments) {
  using Sizes = FlashSizes<kHead>;
  constexpr int kRowTiles = pass == Pass::forward   ? Sizes::forward_row_tiles
                            : pass == Pass::queries ? Sizes::queries_row_tiles
                                                    : Sizes::keys_row_tiles;
  constexpr std::int64_t kBytes = pass == Pass::forward ? flash_forward_shared<kHead, kRowTiles, Sizes::forward_tile>()
                                  : pass == Pass::queries
                                      ? flash_queries_backward_shared<kHead, kRowTiles, Sizes::queries_tile>()
                                      : flash_keys_backward_shared<kHead, kRowTiles, Sizes::keys_tile>();
  static_assert(kBytes <= kDynamicSharedMemory);
  allow_shared_memory(reinterpret_cast<const void*>(flash<Number, kHead, pass>), kBytes, "attention");
  const Attention& shape = arguments.shape;
  constexpr int kRows = kFlashWarps * 16 * kRowTiles;
  const std::int64_t heads = pass == Pass::keys ? shape.kv_heads : shape.heads;
  const std::int64_t blocks = shape.sequences * heads * ((shape.length + kRows - 1) / kRows);
  if (blocks == 0) return;
  flash<Number, kHead, pass><<<static_cast<unsigned>(blocks), kFlashThreads, kBytes, stream_of(execution)>>>(arguments);
  require_launch("attention");
}

template <class Number, Pass pass>
void launch(const Execution& execution, const FlashArguments& arguments) {
  switch (arguments.shape.head_size) {
    case 32:
      return launch<Number, 32, pass>(execution, arguments);
    case 64:
      return launch<Number, 64, pass>(execution, arguments);
    default:
      return launch<Number, 128, pass>(execution, arguments);
  }
}

template <Pass pass>
void launch(const Execution& execution, Scalar type, const FlashArguments& arguments) {
  if (type == Scalar::bf16)
    launch<bf16, pass>(execution, arguments);
  else
    launch<half, pass>(execution, arguments);
}

FlashMatrix view(const AnyMatrix& matrix) { return {static_cast<std::uint16_t*>(matrix.data), matrix.stride}; }

}  // namespace

void attention(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys, AnyMatrix values,
               AnyMatrix out, Array<float> log_sum, Array<std::byte>) {
  FlashArguments arguments{};
  arguments.shape = shape;
  arguments.queries = view(queries);
  arguments.keys = view(keys);
  arguments.values = view(values);
  arguments.out = view(out);
  arguments.new_log_sum = log_sum.data;
  launch<Pass::forward>(execution, queries.type, arguments);
}

void attention_backward(const Execution& execution, const Attention& shape, AnyMatrix queries, AnyMatrix keys,
                        AnyMatrix values, AnyMatrix out, Array<const float> log_sum, AnyMatrix out_gradient,
                        AnyMatrix dq, AnyMatrix dk, AnyMatrix dv, Array<std::byte> workspace) {
  FlashArguments arguments{};
  arguments.shape = shape;
  arguments.queries = view(queries);
  arguments.keys = view(keys);
  arguments.values = view(values);
  arguments.out = view(out);
  arguments.out_gradient = view(out_gradient);
  arguments.dq = view(dq);
  arguments.dk = view(dk);
  arguments.dv = view(dv);
  arguments.log_sum = log_sum.data;
  arguments.delta = reinterpret_cast<float*>(workspace.data);
  launch<Pass::queries>(execution, queries.type, arguments);
  launch<Pass::keys>(execution, queries.type, arguments);
}

}  // namespace weft::kernels::cuda

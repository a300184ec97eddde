// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores: one block of 128 threads per 64 or 128 rows (flash.hpp). 193 to 255 registers per thread,
// so two blocks per multiprocessor; shared memory allows three. Limit: mma.sync, which does not reach the rate of
// Hopper's wgmma; then exp2 and the reads of fragments.
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/attention/flash.hpp"
#include "kernels/warp_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

extern __shared__ __align__(128) unsigned char shared_memory[];

#ifndef WEFT_BEFORE_AMPERE
/// Context of flash.hpp on a GPU.
template <class Number_>
struct DeviceContext {
  using Number = Number_;
  int thread;
  unsigned char* shared;
  std::uint32_t base;  ///< of `shared` in the shared address space

  __device__ __forceinline__ DeviceContext()
      : thread(static_cast<int>(threadIdx.x)),
        shared(shared_memory),
        base(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_memory))) {}

  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() { __syncwarp(); }
  __device__ __forceinline__ void copy16(std::uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(base + to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void copy4(std::uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(base + to), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void commit() { commit_copies(); }
  template <int pending>
  __device__ __forceinline__ void wait() {
    wait_copies<pending>();
  }
  __device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(base + address)
                 : "memory");
  }
  __device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(base + address)
                 : "memory");
  }
  __device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                           std::uint32_t b1) {
    if constexpr (std::is_same_v<Number, bf16>)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  template <class T>
  __device__ __forceinline__ T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(kAllLanes, value, mask);
  }
  __device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};
#endif

enum class Pass { forward, queries, keys };

template <class Number, int kHead, Pass pass>
__global__ void __launch_bounds__(kFlashThreads) flash(const __grid_constant__ FlashArguments arguments) {
#ifdef WEFT_BEFORE_AMPERE
  __trap();  // no products of bf16; Runtime refuses these GPUs
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
  static_assert(kBytes <= kSharedMemory);
  static const bool once = [] {
    require(cudaFuncSetAttribute(flash<Number, kHead, pass>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(kBytes)),
            "attention: shared memory");
    return true;
  }();
  static_cast<void>(once);
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

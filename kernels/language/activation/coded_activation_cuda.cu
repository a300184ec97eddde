// SPDX-License-Identifier: Apache-2.0
//
// Limit: memory. Bytes per element of y in bf16: forward 4, gated 6; backward 6, gated 10, where the two halves of dx
// come from adjacent blocks, the second of which finds x and dy in the second-level cache.
#include "kernels/gemm/fp8_tile_cuda.cuh"
#include "kernels/language/activation/activation_rule.hpp"
#include "kernels/language/activation/coded_activation.hpp"
#include "kernels/language/rows_cuda.cuh"

namespace weft::kernels::cuda {
namespace {

template <MlpActivation kind>
struct Activated {
  AnyMatrix x;
  Scalar type;           // of y
  std::int64_t columns;  // of y

  __device__ __forceinline__ void load(std::int64_t row, std::int64_t column, float (&y)[8]) const {
    float u[8];
    load_columns(x, row, column, y);
    if constexpr (is_gated(kind)) load_columns(x, row, columns + column, u);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      y[i] = activated<kind>(y[i]);
      if constexpr (is_gated(kind)) y[i] *= u[i];
    }
    round_as(type, y);
  }
  __device__ __forceinline__ std::int64_t first_column(std::int64_t tile) const { return tile * kCodeTile; }
};

template <MlpActivation kind>
struct ActivationGradient {
  AnyMatrix x, dy;
  Scalar type;  // of dx

  __device__ __forceinline__ void load(std::int64_t row, std::int64_t column, float (&dx)[8]) const {
    const bool of_u = is_gated(kind) && column >= dy.columns;
    const std::int64_t of_y = of_u ? column - dy.columns : column;
    float g[8], u[8], d[8];
    if constexpr (is_gated(kind)) {
      load_columns_again(x, row, of_y, g);
      load_columns_again(x, row, dy.columns + of_y, u);
      load_columns_again(dy, row, of_y, d);
    } else {
      load_columns(x, row, of_y, g);
      load_columns(dy, row, of_y, d);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const ValueAndSlope f = with_slope<kind>(g[i]);
      if constexpr (is_gated(kind))
        dx[i] = of_u ? d[i] * f.value : d[i] * u[i] * f.slope;
      else
        dx[i] = d[i] * f.slope;
    }
    round_as(type, dx);
  }
  /// Tiles of both halves in turn, where tiles divide them.
  __device__ __forceinline__ std::int64_t first_column(std::int64_t tile) const {
    if (!is_gated(kind) || dy.columns % kCodeTile != 0) return tile * kCodeTile;
    return tile % 2 * dy.columns + tile / 2 * kCodeTile;
  }
};

/// run.template operator()<kind>().
template <class Run>
void for_kind(MlpActivation activation, const Run& run) {
  switch (activation) {
    case MlpActivation::gelu:
      return run.template operator()<MlpActivation::gelu>();
    case MlpActivation::swiglu:
      return run.template operator()<MlpActivation::swiglu>();
    case MlpActivation::geglu:
      return run.template operator()<MlpActivation::geglu>();
    case MlpActivation::relu2:
      return run.template operator()<MlpActivation::relu2>();
    case MlpActivation::gelu_exact:
      return run.template operator()<MlpActivation::gelu_exact>();
  }
}

}  // namespace

void code_activation(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix y, const Coding& to) {
  if (!vectors_fit(y.columns, x) || !tiles_fit(y.rows, y.columns, to) || to.type != CodeType::e4m3)
    return portable::code_activation(execution, activation, x, y, to);
  for_kind(activation, [&]<MlpActivation kind>() {
    code_by_tiles<CodeType::e4m3>(execution, "code_activation", Activated<kind>{x, y.type, y.columns}, y.rows,
                                  y.columns, to);
  });
}

void code_activation_backward(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix dy,
                              AnyMatrix dx, const Coding& to) {
  if (!vectors_fit(dy.columns, x, dy) || !tiles_fit(dx.rows, dx.columns, to) || to.type != CodeType::e5m2)
    return portable::code_activation_backward(execution, activation, x, dy, dx, to);
  for_kind(activation, [&]<MlpActivation kind>() {
    code_by_tiles<CodeType::e5m2>(execution, "code_activation_backward", ActivationGradient<kind>{x, dy, dx.type},
                                  dx.rows, dx.columns, to);
  });
}

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/activation/activation_rule.hpp"
#include "kernels/language/rows_portable.hpp"

namespace weft::kernels::portable {
namespace {

struct ActivationScratch {
  float x[kChunkColumns], u[kChunkColumns], dy[kChunkColumns], dx[kChunkColumns], du[kChunkColumns];
};

template <MlpActivation kind>
void forward(const Execution& execution, AnyMatrix x, AnyMatrix y) {
  for_rows<ActivationScratch>(
      execution, "mlp_activation", y.rows,
      KOKKOS_LAMBDA(const Team& team, ActivationScratch& buffer, std::int64_t row) {
        for_chunks(y.columns, y.columns, [&](std::int64_t column, int count) {
          const float* g = row_chunk(team, x, row, column, count, buffer.x);
          if (is_gated(kind)) {
            const float* u = row_chunk(team, x, row, y.columns + column, count, buffer.u);
            store_chunk(team, y, row, column, count, [&](int c) { return u[c] * activated<kind>(g[c]); });
          } else {
            store_chunk(team, y, row, column, count, [&](int c) { return activated<kind>(g[c]); });
          }
        });
      });
}

template <MlpActivation kind>
void backward(const Execution& execution, AnyMatrix x, AnyMatrix dy, AnyMatrix dx) {
  for_rows<ActivationScratch>(
      execution, "mlp_activation_backward", dy.rows,
      KOKKOS_LAMBDA(const Team& team, ActivationScratch& buffer, std::int64_t row) {
        for_chunks(dy.columns, dy.columns, [&](std::int64_t column, int count) {
          const float* g = row_chunk(team, x, row, column, count, buffer.x);
          const float* d = row_chunk(team, dy, row, column, count, buffer.dy);
          if (is_gated(kind)) {
            const float* u = row_chunk(team, x, row, dy.columns + column, count, buffer.u);
            for_columns(team, count, [&](int c) {  // both before either is stored: dx may be x
              const ValueAndSlope f = with_slope<kind>(g[c]);
              buffer.dx[c] = d[c] * u[c] * f.slope;
              buffer.du[c] = d[c] * f.value;
            });
            store_chunk(team, dx, row, column, count, [&](int c) { return buffer.dx[c]; });
            store_chunk(team, dx, row, dy.columns + column, count, [&](int c) { return buffer.du[c]; });
          } else {
            store_chunk(team, dx, row, column, count, [&](int c) { return d[c] * with_slope<kind>(g[c]).slope; });
          }
        });
      });
}

}  // namespace

void mlp_activation(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix y) {
  switch (activation) {
    case MlpActivation::gelu:
      return forward<MlpActivation::gelu>(execution, x, y);
    case MlpActivation::swiglu:
      return forward<MlpActivation::swiglu>(execution, x, y);
    case MlpActivation::geglu:
      return forward<MlpActivation::geglu>(execution, x, y);
    case MlpActivation::relu2:
      return forward<MlpActivation::relu2>(execution, x, y);
    case MlpActivation::gelu_exact:
      return forward<MlpActivation::gelu_exact>(execution, x, y);
  }
}

void mlp_activation_backward(const Execution& execution, MlpActivation activation, AnyMatrix x, AnyMatrix dy,
                             AnyMatrix dx) {
  switch (activation) {
    case MlpActivation::gelu:
      return backward<MlpActivation::gelu>(execution, x, dy, dx);
    case MlpActivation::swiglu:
      return backward<MlpActivation::swiglu>(execution, x, dy, dx);
    case MlpActivation::geglu:
      return backward<MlpActivation::geglu>(execution, x, dy, dx);
    case MlpActivation::relu2:
      return backward<MlpActivation::relu2>(execution, x, dy, dx);
    case MlpActivation::gelu_exact:
      return backward<MlpActivation::gelu_exact>(execution, x, dy, dx);
  }
}

}  // namespace weft::kernels::portable

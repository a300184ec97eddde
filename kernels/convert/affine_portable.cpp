// SPDX-License-Identifier: Apache-2.0
#include "kernels/convert/affine.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels {
namespace {

struct Scratch {
  float in[kChunkColumns], addend[kChunkColumns], sum[kChunkColumns];
};

/// The value that a matrix of this type holds after `value` is stored in it.
KOKKOS_FORCEINLINE_FUNCTION float stored(Scalar type, float value) {
  if (type == Scalar::bf16) return to_bf16(value);
  if (type == Scalar::fp16) return to_half(value);
  return value;
}

}  // namespace

void affine_rows(const Execution& execution, AnyMatrix in, Array<const float> scale, Array<const float> shift,
                 AnyMatrix addend, AnyMatrix out, std::int32_t* flag) {
  for_teams(
      execution, "affine_rows", out.rows, sizeof(Scratch), KOKKOS_LAMBDA(const Team& team) {
        Scratch& buffer = scratch<Scratch>(team);
        const std::int64_t row = team.league_rank();
        int bad = 0;
        for_chunks(out.columns, out.columns, [&](std::int64_t column, int count) {
          const float* const x = row_chunk(team, in, row, column, count, buffer.in);
          const float* const y =
              addend.data == nullptr ? nullptr : row_chunk(team, addend, row, column, count, buffer.addend);
          for_columns(team, count, [&](int c) {
            float value = x[c];
            if (scale.size > 0) value *= scale.data[column + c];
            if (shift.size > 0) value += shift.data[column + c];
            if (y != nullptr) value += y[c];
            buffer.sum[c] = stored(out.type, value);
          });
          if (flag != nullptr)
            bad += sum_columns<int>(team, count, [&](int c) { return is_finite(buffer.sum[c]) ? 0 : 1; });
          store_chunk(team, out, row, column, count, [&](int c) { return buffer.sum[c]; });
        });
        if (bad != 0) once(team, [&] { Kokkos::atomic_or(flag, 1); });
      });
}

}  // namespace weft::kernels

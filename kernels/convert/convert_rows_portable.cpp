// SPDX-License-Identifier: Apache-2.0
#include "kernels/convert/convert_rows.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::portable {

void normalise_rows(const Execution& execution, AnyMatrix raw, Array<const float> mean, Array<const float> scale,
                    AnyMatrix out, std::int32_t* flag) {
  for_teams(
      execution, "normalise_rows", raw.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        auto& buffer = scratch<float[kChunkColumns]>(team);
        int bad = 0;
        for_chunks(raw.columns, raw.columns, [&](std::int64_t column, int count) {
          const float* value = row_chunk(team, raw, row, column, count, buffer);
          const float* centre = mean.data + column;
          const float* factor = scale.data + column;
          bad += sum_columns<int>(team, count, [&](int c) { return is_finite(value[c]) ? 0 : 1; });
          store_chunk(team, out, row, column, count, [&](int c) { return (value[c] - centre[c]) * factor[c]; });
        });
        if (bad != 0) once(team, [&] { Kokkos::atomic_or(flag, 1); });
      });
}

void copy_rows(const Execution& execution, AnyMatrix in, AnyMatrix out) {
  for_teams(
      execution, "copy_rows", in.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        auto& buffer = scratch<float[kChunkColumns]>(team);
        for_chunks(in.columns, in.columns, [&](std::int64_t column, int count) {
          const float* value = row_chunk(team, in, row, column, count, buffer);
          store_chunk(team, out, row, column, count, [&](int c) { return value[c]; });
        });
      });
}

}  // namespace weft::kernels::portable

namespace weft::kernels {

void round_to_bf16(const Execution& execution, Array<float> values) {
  for_all(
      execution, "round_to_bf16", values.size,
      KOKKOS_LAMBDA(std::int64_t i) { values[i] = static_cast<float>(to_bf16(values[i])); });
}

}  // namespace weft::kernels

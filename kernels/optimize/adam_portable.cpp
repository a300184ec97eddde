// SPDX-License-Identifier: Apache-2.0
#include <cfloat>

#include "kernels/optimize/adam.hpp"
#include "kernels/optimize/adam_row.hpp"
#include "kernels/optimize/packed_weights.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::portable {

void adam_rows(const Execution& execution, const ParameterRows& parameters, std::int64_t row_begin,
               Matrix<const float> gradient, const AdamStep* step) {
  require_portable_storage(parameters);
  for_teams(
      execution, "adam_rows", gradient.rows, sizeof(AdamScratch), KOKKOS_LAMBDA(const Team& team) {
        const AdamStep adam = *step;
        if (adam.withheld != 0) return;
        const std::int64_t row = team.league_rank();
        AdamScratch& buffer = scratch<AdamScratch>(team);
        for_chunks(parameters.columns, parameters.segment, [&](std::int64_t column, int count) {
          update_chunk(team, parameters, row_begin + row, column, count, gradient.row(row) + column, AdamRule{}, adam,
                       buffer);
        });
      });
}

void adam_vector(const Execution& execution, const ParameterVector& parameters, Array<const float> gradient,
                 const AdamStep* step) {
  for_all(
      execution, "adam_vector", gradient.size, KOKKOS_LAMBDA(std::int64_t i) {
        if (step->withheld == 0) adam_bias(parameters, i, gradient[i], *step);
      });
}

void initialise_uniform(const Execution& execution, const ParameterRows& parameters, float bound, std::uint64_t seed,
                        Purpose purpose) {
  require_portable_storage(parameters);
  for_teams(
      execution, "initialise_uniform", parameters.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        const bool wide = parameters.storage == StorageType::fp32;
        const std::uint64_t first_element = parameters.global_element(row, 0);
        const std::int64_t at = row * parameters.columns;
        // Element e is word e % 4 of the generator's call e / 4.
        for_columns(team, static_cast<int>(parameters.columns), [&](int c) {
          const std::uint64_t element = first_element + static_cast<std::uint64_t>(c);
          const Random4 random = philox(seed, purpose, 0, element / 4);
          const float weight = bound * (2.0f * uniform_float(random.word[element % 4]) - 1.0f);
          if (wide)
            static_cast<float*>(parameters.weight)[at + c] = weight;
          else
            static_cast<bf16*>(parameters.weight)[at + c] = to_bf16(weight);
        });
      });
}

void weights_to_float(const Execution& execution, const ParameterRows& parameters, std::int64_t row_begin,
                      Matrix<float> out) {
  if (parameters.packing != Packing::none)
    return portable::unpack_weights(execution, parameters, row_begin,
                                    {out.data, Scalar::fp32, out.rows, out.columns, out.stride});
  require_portable_storage(parameters);
  for_teams(
      execution, "weights_to_float", out.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank();
        auto& buffer = scratch<float[kChunkColumns]>(team);
        for_chunks(parameters.columns, parameters.segment, [&](std::int64_t column, int count) {
          const float* weight = weight_chunk(team, parameters, row_begin + row, column, count, buffer);
          float* to = out.row(row) + column;
          for_columns(team, count, [&](int c) { to[c] = weight[c]; });
        });
      });
}

void weights_from_float(const Execution& execution, const ParameterRows& parameters, std::int64_t row_begin,
                        Matrix<const float> in) {
  if (parameters.packing != Packing::none) return pack_weights(execution, parameters, row_begin, in);
  require_portable_storage(parameters);
  const bool wide = parameters.storage == StorageType::fp32;
  for_teams(
      execution, "weights_from_float", in.rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t row = team.league_rank(), at = (row_begin + row) * parameters.columns;
        for_columns(team, static_cast<int>(parameters.columns), [&](int c) {
          if (wide)
            static_cast<float*>(parameters.weight)[at + c] = in(row, c);
          else
            static_cast<bf16*>(parameters.weight)[at + c] = to_bf16(in(row, c));
        });
      });
}

void flag_beyond(const Execution& execution, AnyMatrix matrix, float largest, std::int32_t* flag) {
  for_teams(
      execution, "flag_beyond", matrix.rows, kChunkColumns * sizeof(float), KOKKOS_LAMBDA(const Team& team) {
        auto& buffer = scratch<float[kChunkColumns]>(team);
        int bad = 0;
        for_chunks(matrix.columns, matrix.columns, [&](std::int64_t column, int count) {
          const float* value = row_chunk(team, matrix, team.league_rank(), column, count, buffer);
          bad +=
              sum_columns<int>(team, count, [&](int c) { return value[c] <= largest && value[c] >= -largest ? 0 : 1; });
        });
        if (bad != 0) once(team, [&] { Kokkos::atomic_or(flag, 1); });
      });
}

namespace {

AnyMatrix matrix_of(void* data, Scalar type, std::int64_t rows, std::int64_t columns) {
  return {data, type, rows, columns, columns};
}

}  // namespace

void flag_nonfinite(const Execution& execution, const ParameterRows& parameters, std::int32_t* flag) {
  require_portable_storage(parameters);
  const std::int64_t rows = parameters.rows, columns = parameters.columns;
  const Scalar type = parameters.storage == StorageType::fp32 ? Scalar::fp32 : Scalar::bf16;
  portable::flag_beyond(execution, matrix_of(parameters.weight, type, rows, columns), FLT_MAX, flag);
  if (parameters.storage != StorageType::eight_bit) {
    portable::flag_beyond(execution, matrix_of(parameters.first_moment, type, rows, columns), FLT_MAX, flag);
    portable::flag_beyond(execution, matrix_of(parameters.second_moment, type, rows, columns), FLT_MAX, flag);
    return;
  }
  // A moment that is not finite has an infinite block scale or a NaN code.
  const std::int64_t blocks = parameters.blocks_per_row();
  portable::flag_beyond(execution, matrix_of(parameters.first_scale, Scalar::fp32, rows, blocks), FLT_MAX, flag);
  portable::flag_beyond(execution, matrix_of(parameters.second_scale, Scalar::fp32, rows, blocks), FLT_MAX, flag);
  const std::uint8_t* first = static_cast<const std::uint8_t*>(parameters.first_moment);
  const std::uint8_t* second = static_cast<const std::uint8_t*>(parameters.second_moment);
  for_teams(
      execution, "flag_nonfinite_codes", rows, 0, KOKKOS_LAMBDA(const Team& team) {
        const std::int64_t at = team.league_rank() * columns;
        const int bad = sum_columns<int>(team, static_cast<int>(columns), [&](int c) {
          return (first[at + c] & 0x7f) == kCodeNaN || (second[at + c] & 0x7f) == kCodeNaN ? 1 : 0;
        });
        if (bad != 0) once(team, [&] { Kokkos::atomic_or(flag, 1); });
      });
}

}  // namespace weft::kernels::portable

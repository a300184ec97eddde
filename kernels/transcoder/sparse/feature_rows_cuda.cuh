// SPDX-License-Identifier: Apache-2.0
//
// The feature-major backward pass for any width and type: one warp walks one feature, one column block after another.
// Simple; widths that are multiples of 8 with bf16 rows use the stream (feature_stream_cuda.cuh) instead.
#pragma once

#include "kernels/optimize/adam_cuda.cuh"
#include "kernels/optimize/row_noise_cuda.cuh"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels::cuda {

struct FeatureRows {
  const std::int64_t* offsets;
  const std::uint32_t* token;
  const std::uint32_t* position;
  const float* value;         // by CSR position
  AnyMatrix rows;             // gradient rows or inputs
  std::int64_t first_column;  // column of `rows` for column 0 of the parameters
  std::int64_t first_key;     // key of row 0
  std::int64_t n_rows;
  ParameterRows parameters;  // without storage if only the shape is needed
  const AdamStep* step;      // null: no update
  float* dots;               // by CSR position; null: none
  double* norm;              // by key; null: none
};

template <class Epilogue>
__global__ void walk_features(const FeatureRows a, const __grid_constant__ Epilogue epilogue) {
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (row >= a.n_rows) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const ParameterRows& p = a.parameters;
  const std::int64_t key = a.first_key + row;
  const std::int64_t begin = a.offsets[key], end = a.offsets[key + 1];
  AdamStep adam{};
  adam.gradient_scale = 1.0f;
  if (a.step != nullptr) adam = *a.step;
  if (adam.withheld != 0) return;
  double norm = 0.0;
  for (std::int64_t segment = 0; segment < p.columns; segment += p.segment)
    for (std::int64_t inside = 0; inside < p.segment; inside += kBlockColumns) {
      const std::int64_t column = segment + inside;
      const int count = static_cast<int>(min(std::int64_t{kBlockColumns}, p.segment - inside));
      float weight[kLaneColumns] = {}, sum[kLaneColumns] = {};
      if (Epilogue::kHasExtra || (a.dots != nullptr && begin < end))
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j)
          if (lane + kWarp * j < count)
            weight[j] = static_cast<const bf16*>(p.weight)[row * p.columns + column + lane + kWarp * j];
      for (std::int64_t hit = begin; hit < end; ++hit) {
        const std::uint32_t at = a.position[hit];
        const float value = a.value[at];
        const std::int64_t from = a.token[hit] * a.rows.stride + a.first_column + column;
        float dot = 0.0f;
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j)
          if (lane + kWarp * j < count) {
            const float g = load_element(a.rows.data, a.rows.type, from + lane + kWarp * j);
            sum[j] += value * g;
            dot += weight[j] * g;
          }
        if (a.dots != nullptr) {
          dot = warp_sum(dot);
          if (lane == 0) a.dots[at] = column == 0 ? dot : a.dots[at] + dot;
        }
      }
      if constexpr (Epilogue::kHasExtra)
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j)
          if (lane + kWarp * j < count) sum[j] += epilogue.extra(epilogue.extra.row(key), weight[j]);
      if constexpr (Epilogue::kHasNoise) {
        const std::int64_t local = row * p.columns + column;
        add_noise_strided(epilogue.noise, static_cast<int>(a.first_key / a.n_rows),
                          static_cast<std::uint64_t>(p.first_row * p.columns + local), local, count, lane, sum);
      }
      if (a.norm != nullptr) {
        double square = 0.0;
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
          const double g = adam.gradient_scale * sum[j];
          square += g * g;
        }
        norm += warp_sum(square);
      }
      if (a.step != nullptr) update_strided(epilogue.rule, p, row, column, count, sum, adam, lane);
    }
  if (a.norm != nullptr && lane == 0) a.norm[key] = norm;
}

template <class Epilogue>
void launch_rows(cudaStream_t queue, const FeatureRows& arguments, const Epilogue& epilogue) {
  if (arguments.n_rows == 0) return;
  walk_features<<<blocks_for(arguments.n_rows, 8), 256, 0, queue>>>(arguments, epilogue);
  require_launch("walk_features");
}

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
//
// Noise of private steps in the hand-written backward kernels. ChaCha20 takes about 120 integer instructions per
// element, more than all else that these kernels do with one; the functions are not inlined, because a block of the
// generator is about as long as the cache of instructions.
#pragma once

#include "kernels/optimize/adam_cuda.cuh"
#include "kernels/privacy/row_noise.hpp"

namespace weft::kernels::cuda {

static_assert(kNoiseBlock == kLaneColumns);

/// Adds noise to the eight elements of layer `layer` from `element` on, a multiple of 8. local: of the rows of this
/// rank.
__device__ __noinline__ inline void add_noise8(const RowNoise& noise, int layer, std::uint64_t element,
                                               std::int64_t local, float (&gradient)[kLaneColumns]) {
  if (noise.given != nullptr) {
    const float* const given = noise.given[layer] + local;
    for (int i = 0; i < kLaneColumns; ++i) gradient[i] = noise.add(gradient[i], given[i]);
    return;
  }
  ChachaInput input = noise.stream.block(element / kNoiseBlock);
  input.word[1] += static_cast<std::uint32_t>(layer) * noise.stride << 8;
  const ChachaBlock block = chacha20(noise.stream.key, input);
  const double width = noise.width();
#pragma unroll
  for (int pair = 0; pair < kLaneColumns / 2; ++pair) {
    const NormalPair normal = noise_pair(block, pair);
    gradient[2 * pair] = noise.add(gradient[2 * pair], width * normal.first);
    gradient[2 * pair + 1] = noise.add(gradient[2 * pair + 1], width * normal.second);
  }
}

/// Adds noise to elements element + lane + 32 j, of which there are `count`, that a warp holds.
__device__ __noinline__ inline void add_noise_strided(const RowNoise& noise, int layer, std::uint64_t element,
                                                      std::int64_t local, int count, int lane,
                                                      float (&gradient)[kLaneColumns]) {
  const RowNoise of_layer = noise.of_layer(layer);
  if (noise.given != nullptr || element % kNoiseBlock != 0) {
    for (int j = 0; j < kLaneColumns; ++j) {
      const int inside = lane + kWarp * j;
      if (inside < count)
        gradient[j] = of_layer.add_to(gradient[j], element + static_cast<std::uint64_t>(inside), local + inside);
    }
    return;
  }
  // Each lane draws a block, which has eight neighbouring elements.
  const ChachaBlock block =
      chacha20(of_layer.stream.key, of_layer.stream.block(element / kNoiseBlock + static_cast<std::uint64_t>(lane)));
  double number[kLaneColumns];
#pragma unroll
  for (int pair = 0; pair < kLaneColumns / 2; ++pair) {
    const NormalPair normal = noise_pair(block, pair);
    number[2 * pair] = normal.first;
    number[2 * pair + 1] = normal.second;
  }
  const double width = noise.width();
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) {
    double own = 0;
#pragma unroll
    for (int slot = 0; slot < kLaneColumns; ++slot) {
      const double there = __shfl_sync(kAllLanes, number[slot], lane / kLaneColumns + kWarp / kLaneColumns * j);
      if (lane % kLaneColumns == slot) own = there;
    }
    if (lane + kWarp * j < count) gradient[j] = noise.add(gradient[j], width * own);
  }
}

}  // namespace weft::kernels::cuda

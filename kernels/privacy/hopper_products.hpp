// SPDX-License-Identifier: Apache-2.0
//
// The kernels of hopper_products_cuda.cu: norms and clipped sums of products of bf16 rows, for fused_cuda.cu. GPUs of
// compute capability 9.0 only.
#pragma once

#include "kernels/execution.hpp"
#include "kernels/privacy/examples.hpp"
#include "kernels/privacy/tiles.hpp"

namespace weft::kernels {

/// Sides of a tile: columns of G, columns of X.
inline constexpr int kHopperOutputs = kTileSide, kHopperInputs = 256;
/// Warps that form a tile. Each has a part of a norm.
inline constexpr int kHopperWarps = 8;
constexpr std::int64_t hopper_across(std::int64_t in) { return (in + kHopperInputs - 1) / kHopperInputs; }
/// Tiles of a gradient.
constexpr std::int64_t hopper_tiles(std::int64_t in, std::int64_t out) { return hopper_across(in) * tiles_of(out); }

/// Smaller factors count as 0: sums are kept divided by the factor of their last example, and must stay finite. Such a
/// factor belongs to a norm of 1e30 times the bound.
inline constexpr float kLeastFactor = 1e-30f;

/// Parts into which the sum over examples is cut: the fewest, up to 16, whose tiles occupy nine tenths of the
/// multiprocessors of an H200 at any time. A constant of the shape, so that sums do not depend on the GPU.
constexpr std::int64_t hopper_slices(std::int64_t in, std::int64_t out, std::int64_t examples) {
  constexpr std::int64_t kMultiprocessors = 132, kMost = 16;
  const std::int64_t tiles = hopper_tiles(in, out), most = examples < kMost ? examples : kMost;
  for (std::int64_t slices = 1; slices < most; ++slices) {
    const std::int64_t blocks = tiles * slices, waves = (blocks + kMultiprocessors - 1) / kMultiprocessors;
    if (10 * blocks >= 9 * waves * kMultiprocessors) return slices;
  }
  return most < 1 ? 1 : most;
}

namespace cuda {

/// True on a GPU of compute capability 9.0.
bool has_hopper_products();

/// parts [examples, hopper_tiles, kHopperWarps]: sums of squares of the parts of G_bᵀ X_b, of examples of more than
/// `least` rows, else 0.
void form_hopper_norms(const Execution&, const TileMatrix& x, const TileMatrix& g, const Examples&, std::int64_t least,
                       double* parts);

/// sums [slices, out * in], overwritten: of the examples [count * s / slices, count * (s + 1) / slices) each.
void form_hopper_sums(const Execution&, const TileMatrix& x, const TileMatrix& g, const Examples&, const float* factors,
                      std::int64_t slices, float* sums);

}  // namespace cuda
}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// The kernels of hopper_products_cuda.cu and hopper_gram_cuda.cu: norms and clipped sums of products of bf16 rows, for
// fused_cuda.cu. GPUs of compute capability 9.0 only.
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
/// Number of tiles of a gradient.
constexpr std::int64_t hopper_tiles(std::int64_t in, std::int64_t out) { return hopper_across(in) * tiles_of(out); }

/// Smaller factors count as 0: sums are kept divided by the factor of their last example, and must stay finite. Such a
/// factor belongs to a norm of 1e30 times the bound.
inline constexpr float kLeastFactor = 1e-30f;

/// Blocks that form a sum, as many as an H200 has multiprocessors, and rows of a stage. Constants, so that sums do not
/// depend on the GPU.
inline constexpr std::int64_t kHopperWorkers = 132, kHopperRows = 64;
constexpr std::int64_t hopper_stages(std::int64_t rows) { return (rows + kHopperRows - 1) / kHopperRows; }

/// The tiles of a sum after the last full round of workers. Each is cut into `cuts` ranges of stages; a worker forms
/// `units` ranges one after the other, of two tiles at most. `units` tiles are of one group of `cuts` workers, and the
/// workers of all groups read the same rows at a time.
struct HopperShares {
  int tiles = 0;  ///< 0: a worker forms whole tiles only
  int cuts = 1, units = 1;

  constexpr int groups() const { return tiles / units; }
  constexpr int workers() const { return groups() * cuts; }

  /// Ranges [first_range, first_range + units) of a worker are numbered over the tiles of its group.
  constexpr int first_range(int worker) const { return worker / groups() * units; }
  /// Number, among the shared tiles, of the tile of a range of a worker.
  constexpr int tile_of(int worker, int range) const { return range / cuts * groups() + worker % groups(); }
  /// Index of the part to which the worker writes its sums of the tile of this range.
  constexpr int part_of(int worker, int range) const {
    return 2 * worker + (range / cuts == first_range(worker) / cuts ? 0 : 1);
  }
  /// Calls each(part) for the parts of a tile, in the order of their rows.
  template <class Each>
  WEFT_HOST_DEVICE constexpr void for_each_part(int tile, const Each& each) const {
    const int first = tile / groups() * cuts;
    for (int begin = first / units * units; begin < first + cuts; begin += units)
      each(part_of(begin / units * groups() + tile % groups(), begin < first ? first : begin));
  }
};

/// Division that takes the least time, in stages: writing and adding a part takes a tenth of a stage, the kernel that
/// adds the parts five stages.
constexpr HopperShares hopper_shares(std::int64_t tiles, std::int64_t stages) {
  constexpr int kMostCuts = 8;
  const int rest = static_cast<int>(tiles % kHopperWorkers);
  HopperShares best;
  std::int64_t least = stages;  // of whole tiles
  for (int units = 1; units < kMostCuts; ++units)
    for (int cuts = units + 1; cuts <= kMostCuts && rest % units == 0; ++cuts) {
      const HopperShares shares{rest, cuts, units};
      const std::int64_t time = stages * units / cuts + (rest + shares.workers()) / 10 + 5;
      if (shares.workers() <= kHopperWorkers && time < least) best = shares, least = time;
    }
  return best;
}

/// Number of elements of the parts of shared tiles, of which a worker has two at most. More rows do not take less.
constexpr std::int64_t hopper_parts(std::int64_t in, std::int64_t out, const ExampleSizes& sizes) {
  const std::int64_t most_stages = sizes.rows / kHopperRows + sizes.examples;
  return hopper_shares(hopper_tiles(in, out), most_stages).tiles == 0
             ? 0
             : 2 * kHopperWorkers * kHopperOutputs * kHopperInputs;
}

namespace cuda {

/// True on a GPU of compute capability 9.0.
bool has_hopper_products();

/// parts [examples, hopper_tiles, kHopperWarps]: sums of squares of the parts of G_bᵀ X_b, of examples of more than
/// `least` rows, else 0.
void form_hopper_norms(const Execution&, const TileMatrix& x, const TileMatrix& g, const Examples&, std::int64_t least,
                       double* parts);

/// parts [examples, gram_pairs(tiles of the longest), kHopperWarps]: of the pairs of tiles, as form_gram_pair
/// (tiles.hpp).
void form_hopper_gram(const Execution&, const TileMatrix& x, const TileMatrix& g, const Examples&, std::int64_t least,
                      double error, double* parts);

/// out [g.columns, x.columns] += sum over b of c_b G_bᵀ X_b; rows of `out` begin at multiples of 8 bytes. parts: of
/// hopper_parts elements, overwritten.
void add_hopper_sums(const Execution&, const TileMatrix& x, const TileMatrix& g, const Examples&, const float* factors,
                     Matrix<float> out, float* parts);

}  // namespace cuda
}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// Norms and clipped sums of products by the tensor-core kernels of tiles.hpp, and on GPUs of compute
// capability 9.0, for bf16 rows, of hopper_products.hpp. They store nothing of the size of a gradient or of T x T but
// parts of the clipped sum. GPU only.
//
// Each function is called by try_cuda and returns false, and enqueues nothing, where these kernels do not apply: for
// rows that are not both bf16 or both fp16, whose widths or strides are not multiples of 8 (on compute capability 9.0 G
// may have any width), or that are not aligned to 16 bytes. The caller then uses the dense library. Which is used
// depends on types, shapes and alignment alone.
#pragma once

#include "kernels/dispatch.hpp"
#include "kernels/privacy/examples.hpp"
#include "kernels/privacy/hopper_products.hpp"
#include "kernels/privacy/tiles.hpp"

namespace weft::kernels {

/// Tiles that are formed concurrently, so that few large gradients still occupy a GPU: two for each multiprocessor of
/// an H200. A constant, so that sums do not depend on the GPU.
inline constexpr std::int64_t kTilesAtOnce = 264;

/// Number of parts into which the sum over examples is cut.
constexpr std::int64_t weighed_slices(std::int64_t in, std::int64_t out, std::int64_t examples) {
  const std::int64_t tiles = tiles_of(in) * tiles_of(out), slices = tiles == 0 ? 1 : kTilesAtOnce / tiles;
  return slices < 1 ? 1 : slices < examples ? slices : examples < 1 ? 1 : examples;
}

/// Number of elements of `parts` and `sums`.
constexpr std::int64_t fused_direct_parts(std::int64_t in, std::int64_t out, std::int64_t examples) {
  const std::int64_t tiles = tiles_of(in) * tiles_of(out), on_hopper = hopper_tiles(in, out) * kHopperWarps;
  return examples * (tiles > on_hopper ? tiles : on_hopper);
}
constexpr std::int64_t fused_gram_parts(std::int64_t most_rows, std::int64_t examples) {
  return examples * gram_pairs(tiles_of(most_rows)) * kHopperWarps;
}
constexpr std::int64_t fused_sums(std::int64_t in, std::int64_t out, const ExampleSizes& sizes) {
  const std::int64_t sliced = weighed_slices(in, out, sizes.examples) * in * out,
                     on_hopper = hopper_parts(in, out, sizes);
  return sliced > on_hopper ? sliced : on_hopper;
}

namespace cuda {

/// norms[b] += squares of G_bᵀ X_b, of examples of more than `least` rows. parts: overwritten.
bool form_fused_norms(const Execution&, AnyMatrix x, AnyMatrix g, const Examples&, std::int64_t least,
                      Array<double> norms, Array<double> parts);

/// norms[b] += sum of X Xᵀ ∘ G Gᵀ with its error (at_most), of examples of more than `least` rows. parts:
/// overwritten.
bool form_fused_gram(const Execution&, AnyMatrix x, AnyMatrix g, const Examples&, std::int64_t least, double error,
                     Array<double> norms, Array<double> parts);

/// out += sum over b of c_b G_bᵀ X_b.
bool add_fused_product(const Execution&, AnyMatrix x, AnyMatrix g, const Examples&, Array<const float> factors,
                       Matrix<float> out, Array<float> sums);

}  // namespace cuda
}  // namespace weft::kernels

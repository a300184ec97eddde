// SPDX-License-Identifier: Apache-2.0
//
// Rows of an embedding table, and dropout. The gradient of a table is formed by a GradientSink from ids and gradient
// rows.
#pragma once

#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::kernels {

/// out[n] = tokens[ids[n]] + positions[position[n]]. positions: without data if the model has no learned positions.
/// Tables and out fp32, bf16 or fp16. `tokens` has the rows from first_id on of a table; ids outside belong to other
/// ranks and add nothing. The caller checks that ids are in the whole table.
WEFT_KERNEL(embed, void(const Execution&, AnyMatrix tokens, std::int64_t first_id, Array<const std::uint32_t> ids,
                        AnyMatrix positions, Array<const std::int32_t> position, AnyMatrix out));

/// Place in a model where values are dropped; separates the random numbers.
struct DropoutSite {
  std::uint32_t site = 0;
  float probability = 0;
  /// Global index of row 0 in the step: a mask depends on (seed, step, site, global row, column) alone, so that ranks,
  /// micro-batches and recomputation draw the same one.
  std::int64_t first_row = 0;
};

/// x = mask * x / (1 - probability), in place; the mask is drawn from the seed and number of *step. Applied to a
/// gradient it is its own backward pass. No effect for probability 0.
WEFT_KERNEL(dropout, void(const Execution&, const DropoutSite&, const AdamStep* step, AnyMatrix x));

}  // namespace weft::kernels

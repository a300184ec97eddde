// SPDX-License-Identifier: Apache-2.0
//
// How a private step forms its clipped sum: the mode of each unit (a block, or the head; privacy/clipping.hpp), with
// the time and the memory that follow from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/execution.hpp"
#include "language_model/architecture.hpp"
#include "parallel/grid.hpp"
#include "privacy/clipping.hpp"

namespace weft::language_model {

/// What memory and arithmetic of the clipping follow from. `part`: of the model, on a rank (part_of). privacy.mode is
/// not automatic.
privacy::ClippingShape clipping_shape(const Configuration&, const Architecture& part);

/// Table [privacy] with the modes that privacy.mode = "auto" means, as mode and mode_of: the fastest ones by
/// `unit_seconds` that need no more than device.memory, where that is given, and else at most double the memory of a
/// step without privacy; two_pass if none do. From sizes alone: the same on all ranks and after a restart.
privacy::Settings clipping_settings(const Configuration&, const Architecture&, const parallel::GridShape&,
                                    kernels::Backend);

/// Estimate, in seconds per micro-batch on one H200: norms, clipped sums, and rows that are formed again, of a unit
/// of `part` (a block, or the number of blocks for the head) in `mode`. Rates are measured ones (docs/privacy.md), and
/// constants: a choice by a measurement at run time would change the bits of the next run.
double unit_seconds(const Configuration&, const Architecture& part, std::size_t unit, privacy::Mode mode,
                    kernels::Backend);

/// Lines for the plan of a run: "clipping: blocks 0-7 book_keeping, …".
std::string clipping_text(const Configuration&, const Architecture&, const parallel::GridShape&, kernels::Backend);

}  // namespace weft::language_model

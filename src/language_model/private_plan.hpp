// SPDX-License-Identifier: Apache-2.0
//
// Where the clipped sum of a private step comes from (privacy/clipping.hpp), by the memory that it takes.
#pragma once

#include <string>

#include "kernels/execution.hpp"
#include "language_model/blocks/model_parameters.hpp"
#include "language_model/settings.hpp"
#include "parallel/grid.hpp"
#include "privacy/clipping_plan.hpp"

namespace weft::language_model {

/// Shapes from which memory and arithmetic of the clipping follow. `part`: of the model, on a rank (part_of).
/// privacy.mode is not automatic.
privacy::ClippingShape clipping_shape(const Configuration&, const Architecture& part);

/// Table [privacy] with the mode that privacy.mode = "auto" means: the first of materialise, book_keeping and two_pass
/// whose planned bytes fit (privacy::choose_mode).
privacy::Settings clipping_settings(const Configuration&, const Architecture&, const parallel::GridShape&,
                                    kernels::Backend);

/// Lines for the plan of a run: the mode, and the device memory of the run with each one.
std::string clipping_text(const Configuration&, const Architecture&, const parallel::GridShape&, kernels::Backend);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// The shapes of a private step: from them follow the memory and the arithmetic of the clipping (privacy/clipping.hpp).
#pragma once

#include "language_model/blocks/model_parameters.hpp"
#include "language_model/settings/configuration.hpp"
#include "privacy/clipping_plan.hpp"

namespace weft::language_model {

/// Shapes from which memory and arithmetic of the clipping follow. `part`: of the model, on a rank (part_of).
/// privacy.mode is not automatic.
privacy::ClippingShape clipping_shape(const Configuration&, const Architecture& part);

}  // namespace weft::language_model

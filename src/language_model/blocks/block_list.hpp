// SPDX-License-Identifier: Apache-2.0
//
// The blocks of a model as a list of sublayers: the only place that names their kinds.
#pragma once

#include <vector>

#include "language_model/blocks/residual_sublayer.hpp"

namespace weft::language_model {

/// The sublayers of all blocks, in the order of the forward pass. architecture: of the model, or of a rank's part.
std::vector<ResidualSublayer> make_sublayers(const Architecture& architecture);

}  // namespace weft::language_model

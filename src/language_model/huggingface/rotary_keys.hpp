// SPDX-License-Identifier: Apache-2.0
//
// Rotary positions in config.json of the transformers library.
#pragma once

#include "language_model/huggingface/family.hpp"

namespace weft::language_model {

/// Reads rope_theta with rope_scaling (transformers 4), or rope_parameters (transformers 5).
void read_rotary(ConfigKeys&, ModelSettings&);
/// Adds "rope_theta" and "rope_scaling".
void write_rotary(const ModelSettings&, Json& config);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// Keys of [language_model] for rotary positions (Su et al. 2021) and their wavelengths, language_model.rope_….
#pragma once

#include "input/schema.hpp"
#include "language_model/blocks/model_settings.hpp"

namespace weft::language_model {

/// Largest number of fp32 that a key takes, and largest factor.
constexpr double kLargest = 3e38, kMostScale = 1e6;

/// Keys from rope_base to rope_long. `model` must outlive the schema.
void add_rotary_keys(input::Schema&, ModelSettings& model);
/// Conditions between these keys, rope_window_base and the sizes of heads, all of which were added before.
void add_rotary_rules(input::Schema&, const ModelSettings& model);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// Rotary positions in config.json of the transformers library.
#pragma once

#include "language_model/huggingface/keys/model_family.hpp"

namespace weft::language_model {

/// Keys and defaults of a family.
struct RotaryKeys {
  const char* base = "rope_theta";
  double default_base = 10'000;
  const char* share = "partial_rotary_factor";  ///< rotated part of a head; an error where the family rotates all
  double default_share = 1;
  /// Phi 3: the key that replaces the length of the training in the object, and its default; null: none.
  const char* length = nullptr;
  std::int64_t default_length = 0;
};

/// Reads the base with rope_scaling (transformers 4), or rope_parameters (transformers 5). The sizes of heads and the
/// longest context have been read.
void read_rotary(ConfigKeys&, HuggingfaceConfig&, const RotaryKeys& = {});
/// Adds the base and "rope_scaling".
void write_rotary(const ModelSettings&, Json& config, const RotaryKeys& = {});

/// Reads the bases of Gemma 3: of blocks without a window, with their scaling, and of those with one.
void read_two_bases(ConfigKeys&, HuggingfaceConfig&);

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// The active features of a transcoder on a text, as vectors on raw activations: what they read and what they write.
#pragma once

#include <cstdint>
#include <vector>

#include "device/memory.hpp"
#include "kernels/array.hpp"

namespace weft::language_model {

struct ActiveFeature {
  std::int64_t layer = 0, token = 0, index = 0;
  float activation = 0;
};

struct ActiveFeatures {
  std::vector<ActiveFeature> list;  ///< ascending by layer, token, index
  bool per_layer = false;           ///< features write to their own layer only
  /// What a feature reads, [features, C], where the kernels run.
  device::Buffer<float> encoders;
  /// By source layer, for its features: activation times what they write to the layers from theirs on,
  /// [features of the layer, targets * C].
  std::vector<device::Buffer<float>> decoders;
};

}  // namespace weft::language_model

// SPDX-License-Identifier: Apache-2.0
//
// How strongly the features of each layer write to each later layer, from the decoder weights of a checkpoint.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/resume.hpp"

namespace weft::commands {

struct DecoderMass {
  std::int64_t step = 0;
  std::vector<std::int64_t> features;          ///< by source layer: live features
  std::vector<std::int64_t> all_features;      ///< by source layer
  std::vector<std::vector<double>> magnitude;  ///< [s][t]: root of the mean squared norm of w_f^{s->t}; NaN: no block
  std::vector<std::vector<double>> share;  ///< [s][t]: part of the squared norm of layer s's features; rows sum to 1
};

/// Live features fired within the last `dead_window` tokens (0: at any time). The shapes come from the manifest:
/// encoder_s/weight is [features, d_model], decoder_s/weight is [features, targets * d_model], and the targets are
/// layer s and those after it. Reads a few MiB at a time; the shards must have been verified. Throws Error.
DecoderMass decoder_mass(const checkpoint::Found&, std::int64_t dead_window);

}  // namespace weft::commands

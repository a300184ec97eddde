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

/// Live features fired within the last `dead_window` tokens (0: at any time). Vectors are those of each target,
/// whatever the checkpoint stores (transcoder.decoder). Reads a piece at a time; the shards must have been verified.
/// `alone`: of this process. Throws Error.
DecoderMass decoder_mass(const checkpoint::Found&, const parallel::Communicator& alone, std::int64_t dead_window);

}  // namespace weft::commands

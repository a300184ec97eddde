// SPDX-License-Identifier: Apache-2.0
//
// From an activation that keeps a number of features (batch_topk, topk) to jumprelu: thresholds with which about the
// same features are active, so that a token can be encoded without its batch, and by programs that support only
// thresholds.
//
// Calibration. Over a data set the training activation, batch by batch, keeps K entries (of a layer, or of all layers
// if they share a budget), n[f] of them of feature f. The threshold lies half way between
//
//   per layer     the K-th and (K+1)-th largest pre-activation of the set
//   per feature   the n[f]-th and (n[f]+1)-th largest of the feature; that of its layer if n[f] = 0
//
// so that a program with other rounding keeps the same entries unless they are within that gap. The weights have been
// rounded to the type in which they will be stored, and the threshold is of that type as well.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "dataset/activations/description.hpp"
#include "parallel/world.hpp"
#include "transcoder/forward/forward.hpp"

namespace weft::transcoder {

struct Conversion {
  bool per_feature = true;
  bool bf16 = true;  ///< the type for which weights and thresholds are rounded; else fp32
};

/// Rounds all weights and biases to the nearest bf16 number, whatever their storage.
void round_to_bf16(const Model&, const kernels::Execution&);

/// A forward pass with memory of its own.
struct Pass {
  Pass(const Configuration& configuration, const Model& model, const NormalisationOnDevice& normalisation,
       const parallel::Grid& grid, const kernels::Execution& execution, run::Timers& timers)
      : arena(execution, grid),
        forward(configuration, model, normalisation, grid, execution, timers, configuration.data.batch_tokens, arena) {}
  model::StepArena arena;
  Forward forward;
};

/// Makes a pass with thresholds for batches of `batch_tokens`; transcoder.capacity is `capacity`. Collective.
using JumpingPass = std::function<std::unique_ptr<Pass>(std::int64_t capacity)>;

struct Calibrated {
  std::unique_ptr<Pass> jumping;  ///< has room for the features that are active with the thresholds
  double active = 0;              ///< features per token and layer of the densest batch, on the rank with most
  std::int64_t capacity = 0;      ///< transcoder.capacity of the result: twice as many, at least 64
};

/// The configuration of a training of `steps` steps after step `from` with batch_topk, whose tokens keep different
/// numbers of features, as they do with thresholds; the learning rate falls linearly to 0.
Configuration finetuning(Configuration trained, std::int64_t from, std::int64_t steps);

/// Sets the thresholds of `model`, which both passes use: `counting` has the training activation, those of `jumping`
/// jumprelu. Passes of `jumping` are made again, with twice the room, until there is room for the values that the
/// calibration collects. Requires a data axis of one rank. Host memory: 4 bytes per entry that is collected on this
/// rank over the data set, and about half as many again; throws Error(usage) above 2^30 entries. Collective.
Calibrated calibrate(const Conversion&, const dataset::Description&, const ModelSettings& trained, const Model& model,
                     Forward& counting, const JumpingPass& jumping, const parallel::Grid&, const kernels::Execution&,
                     std::int64_t batch_tokens);

/// Returns a number of the stored type that is below `kept` and, if possible, not below `dropped`; half way between
/// them where possible. dropped < kept or, if they tie, equal.
float threshold_between(float dropped, float kept, bool bf16);

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// The transcoder that a training run begins with (transcoder.initial): weights and normalisation of a checkpoint, with
// fresh moments, clocks and data order.
#pragma once

#include "checkpoint/resume.hpp"
#include "transcoder/settings/transcoder_settings.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::transcoder {

/// Throws a collective Error(usage) unless training with this configuration can begin with the weights of `initial`:
/// the same tensors in the same storage, for activations that are normalised in the same way.
void require_initial(const Configuration&, const checkpoint::Found& initial, std::int64_t n_layers,
                     std::int64_t d_model);

/// Replaces the weights of an initialised trainer by those of `initial`. Collective.
void load_initial(Trainer&, const checkpoint::Found& initial, const parallel::World&, const kernels::Execution&);

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// Naive baselines of what a step of a transcoder does with several ranks: implementations with the same result bit for
// bit, chosen by keys of [benchmark] and given to the trainer in its configuration.
//
//   selection = "rank_0"   rank 0 selects from all pre-activations (selection_on_rank_0.hpp)
//   wait = true            the host waits after each exchange until it is done
//   together = false       one exchange per layer, and ranks sum one histogram after the other
//   keep_buffers = false   memory of exchanges is allocated anew for each use
//   direct = false         GPUs of one host exchange through NCCL
//   prefetch = false       each shuffle block is read when its first row is needed
#pragma once

#include "bench/transcoder/transcoder_input.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::bench {

/// The configuration with the baselines that the settings choose.
transcoder::Configuration with_baselines(transcoder::Configuration, const TranscoderSettings&);

}  // namespace weft::bench

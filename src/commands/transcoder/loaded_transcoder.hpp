// SPDX-License-Identifier: Apache-2.0
//
// The transcoder of a checkpoint with a dataset to apply it to: what evaluate, features and encode begin with.
#pragma once

#include <string>

#include "bench/transcoder/transcoder_input.hpp"
#include "commands/commands.hpp"
#include "device/runtime.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/run/statistics_state.hpp"

namespace weft::commands {

/// --data of the commands that apply a transcoder.
Options& data_option(Options& options, std::string& data);

struct LoadedTranscoder {
  /// request.subject is the checkpoint or a run, `data_option` the dataset of --data ("": the run's validation data).
  /// All ranks are on the feature axis. Collective. Throws, known to all ranks, Error(usage), Error(data) or Error(io).
  LoadedTranscoder(const Request&, const std::string& data_option, const parallel::World&);

  const transcoder::Configuration& configuration() const { return input.configuration; }
  const kernels::Execution& execution() const { return runtime.execution(); }
  std::int64_t batch_tokens() const { return input.configuration.data.batch_tokens; }

  const checkpoint::Found found;
  bench::TranscoderInput input;
  const std::string data;  ///< the directory
  const dataset::Description description;
  const device::Runtime runtime;
  const parallel::Grid grid;
  const dataset::Statistics statistics;
  const transcoder::NormalisationOnDevice normalisation;
  const transcoder::Model model;  ///< without moments
  run::Timers timers;
  model::StepArena arena;
  transcoder::Forward forward;  ///< for batches of batch_tokens()
};

}  // namespace weft::commands

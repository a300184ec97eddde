// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "bench/benchmark.hpp"
#include "dataset/activations/synthetic.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::bench {

enum class Formulation { sparse, dense };

/// Where a batch-wide selection is made: by all ranks together, or by rank 0 from all values.
enum class SelectionPlace { everywhere, rank_0 };

/// Where batches come from: memory, or the data of the input, read while steps run.
enum class Batches { resident, data };

/// Table [benchmark] of a transcoder.
struct TranscoderSettings : BenchmarkSettings {
  std::int64_t layers = 12;
  std::int64_t d_model = 768;
  Batches from = Batches::resident;
  Formulation formulation = Formulation::sparse;
  // Baselines (baselines.hpp).
  SelectionPlace selection = SelectionPlace::everywhere;
  bool wait = false;
  bool together = true;
  bool keep_buffers = true;
  bool direct = true;
  bool prefetch = true;
};

/// The input of all commands for transcoders: one file serves synth, train and benchmark.
struct TranscoderInput {
  transcoder::Configuration configuration;
  dataset::SyntheticSettings synthetic;
  TranscoderSettings benchmark;
};

// Every key, bound to the input, which must outlive the schema, with what a command requires: training, its benchmark
// (which needs no data), a transcoder that is trained already, or a dataset alone.
input::Schema training_keys(TranscoderInput&);
input::Schema benchmark_keys(TranscoderInput&);
input::Schema trained_keys(TranscoderInput&);
input::Schema dataset_keys(TranscoderInput&);

}  // namespace weft::bench

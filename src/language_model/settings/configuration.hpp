// SPDX-License-Identifier: Apache-2.0
//
// Tables [language_model] and [memory], and all tables that the training of a language model reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "checkpoint/checkpoint_settings.hpp"
#include "dataset/tokens/token_settings.hpp"
#include "device/device_settings.hpp"
#include "input/schema.hpp"
#include "language_model/blocks/architecture.hpp"
#include "language_model/blocks/model_settings.hpp"
#include "language_model/settings/adapter_keys.hpp"
#include "model/moments.hpp"
#include "optimizer/optimizer_settings.hpp"
#include "parallel/parallel_settings.hpp"
#include "privacy/privacy_settings.hpp"
#include "run/run_settings.hpp"

namespace weft::language_model {

using device::Precision;
/// Samples that a run prints when it evaluates (table [log]).
struct SampleSettings {
  std::int64_t tokens = 0;   ///< 0: none
  double temperature = 0.8;  ///< 0: the most probable token
};

struct Configuration {
  Configuration();  ///< the defaults of `weft lm`

  run::RunSettings run;
  dataset::TokenSettings data;
  ModelSettings language_model;
  std::string
      initial;  ///< language_model.initial: the model with the initial weights (run/initial_model.hpp); "": none
  LoraSettings lora;
  optimizer::Settings optimizer;
  privacy::Settings privacy;
  MemorySettings memory;
  parallel::Settings parallel;
  device::Settings device;
  Precision precision = Precision::fp32;  ///< device.precision
  bool fp8 = false;                       ///< device.fp8
  /// device.attention; recorded: those that the algorithm table device.algorithms names, else the own ones.
  kernels::AttentionImplementation attention_kernels = kernels::AttentionImplementation::recorded;
  checkpoint::Settings checkpoint;
  run::LogSettings log;
  SampleSettings sample;
  run::ResumeSettings resume;
  AttentionKernels attention;  ///< no key: set by benchmarks

  /// Storage of the optimizer state.
  model::Moments moments() const { return memory.offload_optimizer ? model::Moments::on_host : model::Moments::held; }
  /// parallel.shard, where ranks divide the batch.
  parallel::Shard shard() const { return parallel.data > 1 ? parallel.shard : parallel::Shard::state; }
  /// Most tokens of a step on one rank: whole sequences.
  std::int64_t rank_tokens() const {
    return parallel::largest_part(data.batch_tokens / data.sequence, parallel.data) * data.sequence;
  }
  /// Tokens of a micro-batch; the last one of a step may be smaller.
  std::int64_t micro_tokens() const {
    return memory.micro_tokens > 0 ? std::min(memory.micro_tokens, rank_tokens()) : rank_tokens();
  }
};

/// Grid of parallel.data groups (no key: all of the job) of parallel.tensor ranks.
parallel::GridShape grid_shape(const Configuration&);
/// Grid of `n_ranks` ranks that have one copy of a model.
parallel::GridShape one_copy(std::int64_t n_ranks);
/// Grid of a command that runs on one process.
parallel::GridShape single_process();
/// A job of `n_ranks` has as many groups of parallel.tensor ranks as it can. Throws a collective Error(usage) if ranks
/// are left over, or if a step has fewer sequences than groups.
void use_ranks(Configuration&, std::int64_t n_ranks);

/// Settings of the runtime from table [device].
inline device::Settings device_settings(const Configuration& configuration) {
  return device::for_precision(configuration.device, configuration.precision);
}
inline kernels::Scalar activation_type(const Configuration& configuration) {
  if (device::is_wide(configuration.precision)) return kernels::Scalar::fp32;
  return configuration.precision == Precision::fp16 ? kernels::Scalar::fp16 : kernels::Scalar::bf16;
}

/// True if cuDNN has the attention of this model.
bool library_attention(const Configuration&);
/// Why a run cannot divide the model as parallel.tensor and parallel.shard say: its sizes, or a key that declares that
/// it does not go with them; "" if it can.
std::string obstacle_to_grid(const Configuration&, const Architecture&);
/// Throws a collective Error(usage) unless the ranks form groups of `tensor`, each with one copy of the model.
void require_groups(std::int64_t tensor, std::int64_t n_ranks);

/// Every key of the tables above, bound to the members of `configuration`, which must outlive the schema and hold its
/// initial values, with the conditions between keys.
input::Schema schema(Configuration& configuration);

}  // namespace weft::language_model

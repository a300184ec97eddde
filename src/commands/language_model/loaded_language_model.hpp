// SPDX-License-Identifier: Apache-2.0
//
// A language model, ready for forward passes: what evaluate and harvest begin with.
#pragma once

#include <optional>

#include "commands/language_model/opened.hpp"
#include "device/runtime.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::commands {

/// The ranks of a job in groups of parallel.tensor neighbours, which have one copy of the model each.
struct ModelRanks {
  /// Collective.
  ModelRanks(std::int64_t tensor, const parallel::World&);

  const parallel::Communicator copy;   ///< this rank's group
  const parallel::Communicator peers;  ///< the ranks with the same part of the model: groups divide the work
  const parallel::Grid grid;           ///< of the group

  bool leads() const { return copy.rank() == 0; }  ///< true for one rank of each group
};

/// Prints the plan of a command that forms no gradients, for --dry-run; returns 0.
int print_plan(const Request&, const OpenedModel&, const language_model::Plan&);
/// Throws a collective Error(usage) that names parallel.tensor unless each rank has the memory of the plan.
void require_memory(const OpenedModel&, const language_model::Plan&, const parallel::World&);

/// This rank's part of a language model, for forward passes; without a tensor axis all of it.
struct ForwardModel {
  /// Collective.
  ForwardModel(const OpenedModel&, const parallel::World&, const kernels::Execution&);
  /// The plan of forward passes over `rows` rows, on the rank that needs most.
  static language_model::Plan plan(const OpenedModel&, std::int64_t rows);

  const ModelRanks ranks;
  language_model::Model model;  ///< without moments
};

/// The exchanges of a transformer of a divided model, which must outlive it; empty if the group has one rank. gathered:
/// bytes of a rank that are gathered at a time, at least.
std::optional<model::TensorAxis> tensor_axis(const language_model::TransformerSettings&, const ModelRanks&,
                                             const kernels::Execution&, model::StepArena&, bool overlap,
                                             std::int64_t gathered = 0);

struct LoadedLanguageModel {
  /// request.subject is the model (opened.hpp). Every rank has its part of the model. Collective. Throws as
  /// OpenedModel.
  LoadedLanguageModel(const Request&, const parallel::World&);

  const language_model::Configuration& configuration() const { return opened.configuration(); }
  const language_model::Architecture& architecture() const { return opened.architecture; }
  const kernels::Execution& execution() const { return runtime.execution(); }

  const OpenedModel opened;
  const device::Runtime runtime;
  const std::optional<language_model::Tokenizer> tokenizer;
  ForwardModel part;
};

/// A transformer for forward passes over at most `rows` rows, and the memory of its tokens. overlap: exchanges of a
/// divided model run on a stream of their own.
struct ForwardOnly {
  ForwardOnly(const language_model::Configuration&, const ForwardModel&, std::int64_t rows, bool overlap);
  ForwardOnly(const LoadedLanguageModel& loaded, std::int64_t rows)
      : ForwardOnly(loaded.configuration(), loaded.part, rows, true) {}

  const language_model::TransformerSettings settings;
  run::Timers timers;
  model::StepArena arena;
  std::optional<model::TensorAxis> tensor;
  language_model::Transformer transformer;
  language_model::Staging staging;
};

}  // namespace weft::commands

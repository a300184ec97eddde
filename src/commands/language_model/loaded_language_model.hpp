// SPDX-License-Identifier: Apache-2.0
//
// A language model, ready for forward passes: what evaluate and harvest begin with.
#pragma once

#include <optional>

#include "commands/language_model/opened.hpp"
#include "device/runtime.hpp"
#include "language_model/step/staging.hpp"
#include "language_model/step/transformer.hpp"

namespace weft::commands {

/// A whole language model in the memory of this process, for forward passes.
struct WholeModel {
  /// Collective.
  WholeModel(const OpenedModel&, const parallel::World&, const kernels::Execution&);

  const parallel::Communicator self;  ///< this rank alone
  const parallel::Grid grid;
  const language_model::Model model;  ///< without moments
};

struct LoadedLanguageModel {
  /// request.subject is the model (opened.hpp). Every rank has the whole model. Collective. Throws as OpenedModel.
  LoadedLanguageModel(const Request&, const parallel::World&);

  const language_model::Configuration& configuration() const { return opened.configuration(); }
  const language_model::Architecture& architecture() const { return opened.architecture; }
  const kernels::Execution& execution() const { return runtime.execution(); }

  const OpenedModel opened;
  const device::Runtime runtime;
  const std::optional<language_model::Tokenizer> tokenizer;
  const WholeModel whole;
};

/// A transformer for forward passes over at most `rows` rows, and the memory of its tokens.
struct ForwardOnly {
  ForwardOnly(const language_model::Configuration&, const WholeModel&, std::int64_t rows);
  ForwardOnly(const LoadedLanguageModel& loaded, std::int64_t rows)
      : ForwardOnly(loaded.configuration(), loaded.whole, rows) {}

  const language_model::TransformerSettings settings;
  run::Timers timers;
  model::StepArena arena;
  language_model::Transformer transformer;
  language_model::Staging staging;
};

}  // namespace weft::commands

// SPDX-License-Identifier: Apache-2.0
//
// The model that a training run begins with (language_model.initial): of a run, of a checkpoint, or in a directory of
// Hugging Face.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/resume.hpp"
#include "language_model/exchange/directory.hpp"
#include "language_model/settings.hpp"
#include "parallel/world.hpp"
#include "training/parameters.hpp"

namespace weft::language_model {

class InitialModel {
 public:
  /// Opens configuration.initial, which is not empty; a run stands for its newest checkpoint. Collective. Throws, known
  /// to all ranks, Error(usage) if the settings [language_model] are not those of the model, Error(data) or Error(io).
  InitialModel(const Configuration&, const parallel::World&);

  std::int64_t vocabulary() const { return vocabulary_; }
  /// Its own training was private, as its checkpoint says.
  bool is_private() const;
  /// None: the model was trained on token files without one, or its directory has none. Collective.
  std::optional<Tokenizer> tokenizer(const parallel::World&, const kernels::Execution&) const;
  /// Fills the weights of a model of this architecture; moments stay as they are. Collective. Throws a collective
  /// Error(usage) if the checkpoint stores them in another type or for another number of positions.
  void load(const training::Parameters&, const parallel::World&, const kernels::Execution&) const;

 private:
  void require_settings(const Configuration&) const;

  std::optional<checkpoint::Found> found_;         // or
  std::optional<HuggingfaceDirectory> directory_;  // of Hugging Face
  std::int64_t vocabulary_ = 0;
};

}  // namespace weft::language_model

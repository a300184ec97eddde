// SPDX-License-Identifier: Apache-2.0
//
// The model that a training run begins with (language_model.initial): of a run, of a checkpoint, or in a directory of
// Hugging Face.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/resume.hpp"
#include "language_model/huggingface/model_directory.hpp"
#include "language_model/settings/configuration.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "model/parameters.hpp"
#include "parallel/world.hpp"

namespace weft::language_model {

class InitialModel {
 public:
  /// Opens configuration.initial, which is not empty; a run stands for its newest checkpoint. Collective. Throws, known
  /// to all ranks, Error(usage) if the settings [language_model] are not those of the model, Error(data) or Error(io).
  InitialModel(const Configuration&, const parallel::World&);

  std::int64_t vocabulary() const { return vocabulary_; }
  /// Length in tokens of the longest text of the initial model, which training keeps if data.sequence is shorter.
  std::int64_t context() const { return context_; }
  /// Architecture::family
  const std::string& family() const { return family_; }
  /// True if the checkpoint states that the initial model was trained privately.
  bool is_private() const;
  /// Tokeniser of the initial model; none if it was trained on token files without one, or its directory has none.
  /// Collective.
  std::optional<Tokenizer> tokenizer(const parallel::World&, const kernels::Execution&) const;
  /// Throws a collective Error(usage) if `load` cannot fill a model of this architecture: its weights are stored in
  /// another type, or for fewer positions than data.sequence.
  void require_weights(const Configuration&, const Architecture&) const;
  /// Fills the weights of a model of this architecture; moments stay as they are. Collective.
  void load(const model::Parameters&, const parallel::World&, const kernels::Execution&) const;

 private:
  void require_settings(const Configuration&) const;

  std::optional<checkpoint::Found> found_;         // or
  std::optional<HuggingfaceDirectory> directory_;  // of Hugging Face
  std::int64_t vocabulary_ = 0, context_ = 0;
  std::string family_;
};

/// Table [language_model] of the model of configuration.initial, as TOML, if that is a directory of Hugging Face; else
/// "". Throws as read_config_of.
std::string table_of_initial(const Configuration&);

/// The model of configuration.initial; none if that is "". Collective; throws as InitialModel.
std::optional<InitialModel> open_initial(const Configuration&, const parallel::World&);

/// load_corpus with the tokeniser of the initial model, if there is one, for a text whose tokeniser data.tokens does
/// not name. Throws a collective Error(usage) if the ids of the data mean other tokens than those of the model, and if
/// there is a text and neither has a tokeniser. Collective.
Corpus load_corpus(const Configuration&, const std::optional<InitialModel>&, const parallel::World&);

}  // namespace weft::language_model

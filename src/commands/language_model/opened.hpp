// SPDX-License-Identifier: Apache-2.0
//
// The language model that a command names: of a run, of a checkpoint, or in a directory of Hugging Face.
#pragma once

#include <optional>
#include <string>

#include "bench/language_model/language_input.hpp"
#include "commands/commands.hpp"
#include "language_model/huggingface/model_directory.hpp"
#include "language_model/step/model_weights.hpp"

namespace weft::commands {

/// Throws Error(usage) for OWNER/NAME where no OWNER is: a model of a hub is not downloaded.
void require_no_hub_name(const std::string& path);

struct OpenedModel {
  /// request.subject is the model. Its input is that of the checkpoint, or one with the model's settings and sequences
  /// of up to 1024 tokens, with the request's --set; parallel.tensor is 1 unless --set gives it. Collective. Throws,
  /// known to all ranks, Error(usage), Error(data) or Error(io).
  OpenedModel(const Request&, const parallel::World&);

  const language_model::Configuration& configuration() const { return input.configuration; }
  /// The tokeniser; none if the model was trained on token files without one or its directory has none. Collective.
  std::optional<language_model::Tokenizer> tokenizer(const parallel::World&, const kernels::Execution&) const;
  /// Fills the weights of a model of this architecture, without moments; of one without adapters, into which those of
  /// this model are merged. Collective.
  void load(const language_model::Model&, const parallel::World&, const kernels::Execution&) const;
  /// The adapters alone (language_model/step/adapters.hpp), on one process. Throws a collective Error(usage) if there
  /// are none. Collective.
  model::Parameters adapters(const parallel::World&, const kernels::Execution&) const;
  /// Recognises the weights: sha256 of the manifest, or of the configuration and the weights of a directory of Hugging
  /// Face, which rank 0 reads. Collective.
  std::string identity(const parallel::World&) const;
  /// "PATH (step N)" or "PATH".
  std::string name() const;

  bench::LanguageInput input;
  std::optional<checkpoint::Found> found;                         ///< or
  std::optional<language_model::HuggingfaceDirectory> directory;  ///< a directory of Hugging Face
  language_model::Architecture architecture;                      ///< with positions for data.sequence

 private:
  void read(const Request&, const input::Schema&, const parallel::World&);
};

}  // namespace weft::commands

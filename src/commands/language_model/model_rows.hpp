// SPDX-License-Identifier: Apache-2.0
//
// What a transcoder learns from without files: a language model (data.model) computes activations of texts (data.text,
// data.validation_text) while training runs.
//
// Every rank has the model, or with parallel.tensor its part of it, and computes the blocks of rows that it would
// otherwise read from files (dataset/activations/row_source.hpp): order, statistics and results do not depend on the
// number of ranks beyond rounding, and are those of `weft lm harvest` followed by `weft train` with the same
// data.block_rows.
#pragma once

#include <optional>
#include <string>

#include "commands/language_model/loaded_language_model.hpp"
#include "commands/language_model/texts.hpp"
#include "language_model/run/text_rows.hpp"
#include "transcoder/run/training_run.hpp"

namespace weft::commands {

/// The model and the texts of an input, before a device is started.
class ModelRows {
 public:
  /// Opens the model and reads the texts. The model computes with the settings [device] of the transcoder. Collective.
  /// Throws, known to all ranks, Error(usage), Error(data) or Error(io). The configuration must outlive this object.
  ModelRows(const transcoder::Configuration&, const parallel::World&);
  ModelRows(const ModelRows&) = delete;

  /// What the rows are like, and how much memory the model takes. They can be read while there is a RunningModel.
  const transcoder::Datasets& datasets() const { return datasets_; }
  /// A summary for the log, in the form of dataset::summary.
  std::string summary() const;

 private:
  friend struct RunningModel;
  struct Set {
    Set(Texts texts, std::int64_t length);
    Texts texts;
    language_model::TextStream stream;
    language_model::Windows windows;
  };
  Set open(const TextChoice&, const parallel::World&) const;
  dataset::Description describe(const Set&) const;

  const dataset::Settings& settings_;
  const OpenedModel opened_;
  const std::optional<language_model::Tokenizer> tokenizer_;
  const Set train_;
  std::optional<const Set> validation_;
  transcoder::Datasets datasets_;
};

/// The model in the memory of this process: the source of the rows of both datasets.
struct RunningModel {
  /// Loads the model. Gives `data`, which has the datasets of the rows, their sources, and fingerprints of texts and
  /// weights. Collective. References must outlive this object.
  RunningModel(const ModelRows& rows, transcoder::Datasets& data, const device::Runtime&, const parallel::World&);
  RunningModel(const RunningModel&) = delete;

  const ForwardModel model;
  ForwardOnly forward;
  language_model::MlpRecorder recorder;
  language_model::TextRows train;
  std::optional<language_model::TextRows> validation;
};

}  // namespace weft::commands

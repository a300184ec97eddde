// SPDX-License-Identifier: Apache-2.0
//
// A transcoder in place of the MLPs of a language model (language_model/run/mlp_replacement.hpp).
#pragma once

#include <string>

#include "bench/transcoder/transcoder_input.hpp"
#include "commands/command.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "language_model/intervention/intervention.hpp"
#include "language_model/run/mlp_replacement.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/run/statistics_state.hpp"

namespace weft::commands {

/// --set-feature and --scale-feature.
struct InterventionOptions {
  std::vector<std::string> set, scale;

  void add_to(Options&);
  /// Throws a collective Error(usage), also if there are interventions without a transcoder.
  std::vector<language_model::Intervention> list(const std::string& transcoder) const;
};

/// Device memory of a TranscoderReplacement, from sizes alone. Collective; throws as its constructor.
struct PlannedTranscoder {
  PlannedTranscoder(const std::string& path, const language_model::ModelSettings&, std::int64_t rows, kernels::Backend,
                    const parallel::World&);
  std::int64_t bytes = 0;
};

class TranscoderReplacement {
 public:
  /// `path`: a checkpoint or a run of a transcoder with the layers and the width of the model, for batches of at most
  /// `rows` rows. Normalisation and selection are those of its training; a selection over a batch is made over the rows
  /// of one forward pass. Collective. Throws a collective Error(usage) if the transcoder does not fit, or if its
  /// selection in a layer depends on later layers.
  TranscoderReplacement(const std::string& path, const language_model::ModelSettings&, std::int64_t rows,
                        const kernels::Execution&, const parallel::World&);

  language_model::Reconstruction reconstruction();
  /// The features that interventions change, in texts of up to `positions` tokens. alone: the rows of a pass are those
  /// of unrelated texts. Throws a collective Error(usage) if the transcoder does not have them or if its features
  /// cannot be changed.
  language_model::ChangedFeatures changed_features(std::vector<language_model::Intervention>, std::int64_t positions,
                                                   bool alone);
  /// Why its features have no vectors of what they write; "" if they have.
  std::string attribution_obstacle() const;
  /// The features that were active in the last reconstruction, of one text. Those of its first token are left out.
  std::vector<language_model::ActiveFeature> active_features() const;
  /// Their vectors, and the memory of these where the kernels run.
  language_model::ActiveFeatures vectors_of(std::vector<language_model::ActiveFeature>) const;
  std::int64_t vector_bytes(const std::vector<language_model::ActiveFeature>&) const;
  /// Matrices of the skip connection on raw activations, [C, C] by layer (output, input); empty: there is none.
  std::vector<device::Buffer<float>> skip_matrices() const;
  /// Throws a collective Error if a selection was not valid.
  void require_valid_selections() { forward_.require_valid_selections("of the transcoder"); }
  const checkpoint::Found& found() const { return found_; }

 private:
  void form(const kernels::AnyMatrix& inputs, const kernels::Matrix<float>& outputs);
  const kernels::SparseActivations& encode(const kernels::AnyMatrix& inputs);

  const kernels::Execution execution_;
  const checkpoint::Found found_;
  const bench::TranscoderInput input_;
  const parallel::Communicator self_;  // this rank, which has the whole transcoder
  const parallel::Grid grid_;
  const transcoder::Shape shape_;
  const dataset::Statistics statistics_;
  const transcoder::NormalisationOnDevice normalisation_;
  const transcoder::Model model_;
  run::Timers timers_;
  model::StepArena arena_;
  transcoder::Forward forward_;
};

}  // namespace weft::commands

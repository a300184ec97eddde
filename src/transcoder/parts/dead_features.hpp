// SPDX-License-Identifier: Apache-2.0
//
// The auxiliary loss of dead features (transcoder.auxk): on every token and layer the dead features with the largest
// positive pre-activations reconstruct the error that the active ones leave. Formulas:
// kernels/transcoder/loss/auxiliary_loss.hpp.
//
// The loss has a second batch of as many tokens, with the same inputs, its own gradient rows, and lists of the dead
// features in place of the active ones. The backward pass works on both batches as one of 2 N tokens: each row of a
// decoder or encoder has one gradient and one update, whatever the storage type and the clipping. `joint` holds the
// lists; its first entries are those of the active features, at the same positions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class DeadFeatures final : public Part {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    SelectionBuffers selection;
    kernels::Array<float> bias;  ///< [L * F_local], -infinity where the feature is alive
    RowGather::Buffers own_rows;
    kernels::Array<double> squares;  ///< sums of squares, by own token
    kernels::Array<double> workspace, value;
    // Lists for a data axis: those of all groups, then those of the owned features over all tokens.
    kernels::Array<std::int64_t> group_offsets;
    kernels::Array<std::uint32_t> group_key;
    kernels::Array<float> group_value;
    kernels::Array<std::int64_t> owned_offsets;
    kernels::Array<std::uint32_t> owned_key;
    kernels::Array<float> owned_value;
    // Joint lists:
    kernels::Array<std::int64_t> row_offsets, hit_offsets;
    kernels::Array<std::uint32_t> key, hit_token, hit_position;
    kernels::Array<float> value_of_entry;
    kernels::Array<std::byte> transpose_workspace;
  };

  /// True if the settings request the loss.
  static bool wanted(const Configuration& configuration, const Shape&) { return configuration.transcoder.auxk > 0; }
  /// Entries of the joint lists on the largest rank; 0 without the loss.
  static std::int64_t capacity(const Configuration&, const Shape&, const parallel::GridShape&);

  /// Takes memory and makes the selector of dead features. Collective.
  explicit DeadFeatures(PartContext&);

  /// Starts the selection of the features that are dead before the step; it follows the selection of the active ones.
  void begin(ForwardRequest&) override;
  /// Decodes the dead features and sends their gradient rows to all ranks of the feature axis.
  void on_loss() override;
  /// Joins the lists with those of the active features, by token and by feature.
  void before_backward(BackwardPass&) override;

 private:
  kernels::SparseActivations of_owned();
  void join(const kernels::SparseActivations& of_active);
  double value() const;

  const Configuration configuration_;
  const Model& model_;
  Forward& forward_;
  DataAxis& data_axis_;
  GradientRows& gradient_rows_;
  run::Timers& timers_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  std::unique_ptr<Selector> selector_;
  std::vector<kernels::Array<const float>> bias_;  // one per layer, in buffers_.bias
  RowGather gather_;
  kernels::SparseActivations joint_;
  kernels::FeatureHits hits_;
};

}  // namespace weft::transcoder

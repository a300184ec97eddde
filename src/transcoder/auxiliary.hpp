// SPDX-License-Identifier: Apache-2.0
//
// The auxiliary loss of dead features (transcoder.auxk): on every token and layer the dead features with the largest
// positive pre-activations reconstruct the error that the active ones leave. Formulas:
// kernels/transcoder/loss/auxiliary.hpp.
//
// It is a second batch of as many tokens, with the same inputs, gradient rows of its own, and lists of the dead
// features in place of the active ones. The backward pass works on both batches as one of 2 N tokens: each row of a
// decoder or encoder has one gradient and one update, whatever the state policy and the clipping. `joint` holds the
// lists; its first entries are those of the active features, at the same positions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "training/step_arena.hpp"
#include "transcoder/exchange/data_axis.hpp"
#include "transcoder/forward.hpp"

namespace weft::transcoder {

class Auxiliary {
 public:
  /// Empty without the loss.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);
    kernels::Array<float> bias;  ///< [L * F_local], -infinity where the feature is alive
    RowGather::Buffers own_rows;
    kernels::Array<double> squares;  ///< by own token
    kernels::Array<double> workspace, value;
    // With a data axis, the lists of all groups, then those of the owned features over all tokens:
    kernels::Array<std::int64_t> group_offsets;
    kernels::Array<std::uint32_t> group_key;
    kernels::Array<float> group_value;
    kernels::Array<std::int64_t> owned_offsets;
    kernels::Array<std::uint32_t> owned_key;
    kernels::Array<float> owned_value;
    // Joint:
    kernels::Array<std::int64_t> row_offsets, hit_offsets;
    kernels::Array<std::uint32_t> key, hit_token, hit_position;
    kernels::Array<float> value_of_entry;
    kernels::Array<std::byte> transpose_workspace;
  };

  /// True if the settings ask for the loss.
  static bool wanted(const Configuration& configuration) { return configuration.transcoder.auxk > 0; }
  /// The selection of dead features, as settings of a selector.
  static ModelSettings selection(const ModelSettings&);
  /// Entries of the joint lists on the largest rank; 0 without the loss.
  static std::int64_t capacity(const Configuration&, const Shape&, const parallel::GridShape&);

  /// What is passed by reference must outlive this object. Collective.
  Auxiliary(const Configuration&, const Model&, Forward&, DataAxis&, const parallel::Grid&, const kernels::Execution&,
            training::StepArena&);

  bool active() const { return selector_ != nullptr; }

  /// Call before Forward::encode with `selector()` as its follower: the features that are dead before the step are to
  /// be selected. Collective.
  void begin();
  /// Call after it. Collective.
  void finish_selection() { selector_->finish(); }
  /// Decodes the selection and sends the gradient rows `rows` [group tokens, L * d] to all ranks of the feature axis.
  /// gradient_rows: of the reconstruction's loss, own tokens [own, L * d]. Collective.
  void form_rows(const std::function<kernels::AnyMatrix(const Forward::OwnPart&)>& gradient_rows, float factor,
                 kernels::AnyMatrix rows);
  /// Later work waits until all rows are in their place.
  void await_rows();
  /// Joins the lists with those of the active features, by token and by feature. Collective.
  void join(const kernels::SparseActivations& of_active);

  const kernels::SparseActivations& joint() const { return joint_; }
  const kernels::FeatureHits& hits() const { return hits_; }

  /// Of the last step, over this rank's own tokens, with its coefficient; `factor` is that of the gradient rows. Waits
  /// for the device.
  double value(float factor) const;
  /// Of its gradient rows of the own tokens; on the device. Valid after `form_rows`.
  const double* sum_of_squares() const { return buffers_.value.data; }
  Selector& selector() { return *selector_; }
  const Selector& selector() const { return *selector_; }

 private:
  kernels::SparseActivations of_owned();

  const Configuration configuration_;
  const Model& model_;
  Forward& forward_;
  DataAxis& data_axis_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  std::unique_ptr<Selector> selector_;
  std::vector<kernels::Array<const float>> bias_;  // by layer, in buffers_.bias
  RowGather gather_;
  kernels::SparseActivations joint_;
  kernels::FeatureHits hits_;
};

}  // namespace weft::transcoder

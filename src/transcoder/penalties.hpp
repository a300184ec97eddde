// SPDX-License-Identifier: Apache-2.0
//
// The penalties of the loss besides the error of the reconstruction, over N tokens of a batch:
//
//   loss = reconstruction + lambda(t)/N sum tanh(c a nu) + kappa/N sum q(z)
//
// (transcoder.sparsity_reduction and preactivation_reduction may replace N) with nu the norm of a feature's decoder
// row; formulas and gradients: kernels/transcoder/loss/penalty.hpp. The first works on active entries; what it adds to
// gradients of thresholds, and all of the second, needs every pre-activation and is formed in jump_backward.hpp.
//
// A rank works on the features that it updates and the tokens of the whole batch. Norms are those of the decoder before
// the update of the step.
#pragma once

#include <cstdint>

#include "kernels/transcoder/loss/penalty.hpp"
#include "training/step_arena.hpp"
#include "transcoder/model.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

class Penalties {
 public:
  /// Empty without penalties. [L * owned] by key unless stated.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);
    kernels::Array<float> norm;
    kernels::Array<float> norm_gradient;                ///< of the sparsity penalty; then the factors of decoder rows
    kernels::Array<double> sparsity;                    ///< value
    kernels::Array<float> preactivation_norm_gradient;  ///< with that penalty
    kernels::Array<float> preactivation;                ///< value
    kernels::Array<float> next_norm;                    ///< of decoder rows as they are now: `norm` of the next step
    kernels::Array<double> workspace, sums;             ///< sums: [2] sparsity, preactivation
  };

  /// `step` is read by kernels. What is passed by reference must outlive this object.
  Penalties(const Configuration&, const Model&, const parallel::GridShape&, const kernels::Execution&,
            const kernels::AdamStep* step, training::StepArena&);

  /// True if the settings ask for a penalty.
  static bool wanted(const Configuration&);
  bool active() const { return of_activations_ || of_preactivations_; }

  /// Call after decoder rows have changed by other means than a step.
  void decoder_changed() { norms_known_ = false; }
  /// Call before a step, outside what is recorded: forms the norms of decoder rows unless the last step has left them.
  void prepare();
  /// Norms, and all that active entries give, of a batch of n_tokens. Before any parameter is updated.
  void form(const kernels::SparseActivations&, const kernels::FeatureHits&, std::int64_t n_tokens);
  /// With what jump_backward has added: the factors of decoder rows, and the values.
  void complete();
  /// Of decoder rows in their gradient, after `complete`. Empty without penalties.
  kernels::Array<const float> row_factors() const { return buffers_.norm_gradient; }
  /// Where the update leaves the norms of the new rows. Empty without penalties.
  kernels::Array<float> next_norms() const { return buffers_.next_norm; }
  void add_to(kernels::Array<float> activation_gradient, const kernels::SparseActivations&);

  kernels::SparsityPenalty sparsity() const;            ///< of the batch of `form`
  kernels::PreactivationPenalty preactivation() const;  ///< likewise
  const Buffers& buffers() const { return buffers_; }

  /// Of this rank's features in the last step, both terms: what `sums` holds. Waits for the device.
  std::pair<double, double> values() const;

 private:
  double divisor(Reduction) const;
  std::int64_t n_keys() const { return model_.shape().n_layers * model_.owned().size(); }

  const ModelSettings settings_;
  const std::int64_t steps_;  // of the run
  const bool of_activations_, of_preactivations_;
  const Model& model_;
  const kernels::Execution execution_;
  const kernels::AdamStep* step_;
  const Buffers buffers_;
  std::int64_t n_tokens_ = 1;
  bool norms_known_ = false;
};

}  // namespace weft::transcoder

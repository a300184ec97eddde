// SPDX-License-Identifier: Apache-2.0
//
// The penalties that the loss contains in addition to the error of the reconstruction, over N tokens of a batch:
//
//   loss = reconstruction + lambda(t)/N sum tanh(c a nu) + kappa/N sum q(z)
//
// (transcoder.sparsity_reduction and preactivation_reduction may replace N) with nu the norm of a feature's decoder
// row; formulas and gradients: kernels/transcoder/loss/penalty.hpp. The first penalty works on active entries. Its
// contribution to gradients of thresholds, and the whole second penalty, need every pre-activation and are formed in
// thresholds.hpp.
//
// A rank works on the features that it updates and the tokens of the whole batch. Norms are those of the decoder before
// the update.
#pragma once

#include <cstdint>

#include "kernels/transcoder/loss/penalty.hpp"
#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class Penalties final : public Part {
 public:
  /// Buffers of the penalties; [L * owned] by key unless stated.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    kernels::Array<float> norm;
    kernels::Array<float> norm_gradient;  ///< gradient of the sparsity penalty; then the factors of decoder rows
    kernels::Array<double> sparsity;      ///< value of the penalty
    kernels::Array<float> preactivation_norm_gradient;  ///< only with the penalty on pre-activations
    kernels::Array<float> preactivation;                ///< value of that penalty
    kernels::Array<float> next_norm;                    ///< norms of the present decoder rows: `norm` of the next step
    kernels::Array<double> workspace, sums;             ///< sums: [2] sparsity, preactivation
  };

  static bool wanted(const Configuration& configuration, const Shape&) {
    return has_penalties(configuration.transcoder);
  }

  explicit Penalties(PartContext&);

  /// Forms the norms of decoder rows, unless the last step has stored them.
  void before_step(std::int64_t step) override;
  /// Forms norms and the contributions of active entries. With a penalty on pre-activations, thresholds then add its
  /// sums and call `complete`.
  void before_decoder(BackwardPass&) override;
  void after_decoder(BackwardPass&) override;

  /// Forms the values, and the factors of decoder rows in their gradient.
  void complete();
  kernels::SparsityPenalty sparsity() const;            ///< penalty for the present batch
  kernels::PreactivationPenalty preactivation() const;  ///< penalty for the present batch
  /// True if the loss has a penalty on pre-activations.
  bool needs_preactivations() const { return of_preactivations_; }
  const Buffers& buffers() const { return buffers_; }

 private:
  double divisor(Reduction) const;
  std::int64_t n_keys() const { return model_.shape().n_layers * model_.owned().size(); }

  const ModelSettings settings_;
  const std::int64_t steps_;  // steps of the run
  const bool of_activations_, of_preactivations_;
  const Model& model_;
  Forward& forward_;
  const kernels::Execution execution_;
  const kernels::AdamStep* constants_;
  const std::int64_t& changes_;
  const Buffers buffers_;
  std::int64_t norms_of_changes_ = -1;  // value of `changes_` when next_norm was formed
};

}  // namespace weft::transcoder

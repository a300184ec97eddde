// SPDX-License-Identifier: Apache-2.0
//
// The update of all parameters from gradients in memory (AccumulatingSink): norm, finiteness, clipping, AdamW.
//
//   update.reduce();            // sums over the ranks
//   update.form_norm(flags);    // |g|², fp64 sums in a fixed order; flags a gradient that is not finite
//   runner.guard(flags);        // StepRunner: withholds the step
//   update.apply(constants);    // clips by the norm of this step, then updates
//
// With a scaled loss (kernels/optimize/loss_scale.hpp) gradients carry its scale until `apply`, which divides by it
// first: norm and clipping are those of the gradient itself.
#pragma once

#include <optional>
#include <span>

#include "kernels/optimize/loss_scale.hpp"
#include "model/data_parallel.hpp"
#include "model/gradient_sink.hpp"
#include "model/parameters.hpp"
#include "model/state_stream.hpp"
#include "model/step_arena.hpp"
#include "model/tensor_axis.hpp"
#include "optimizer/optimizer_settings.hpp"

namespace weft::model {

class ParameterUpdate {
 public:
  struct Buffers {
    /// elements: AccumulatingSink::elements of the largest rank. state: of parameters with Moments::on_host.
    Buffers(std::int64_t elements, StepArena&, const StateStream::Buffers& state = {}, DataParallel::Buffers&& = {});
    kernels::Array<double> squares;    ///< squared norms of AccumulatingSink::matrix_rows and vector_rows
    kernels::Array<double> workspace;  ///< workspace of their sum
    kernels::Array<double> norm;       ///< [2]: square of this step's norm; norm of the last step that was not withheld
    StateStream::Buffers state;
    DataParallel::Buffers exchange;
  };

  /// All references must outlive the object. overlap, gathered, slots: of DataParallel. tensor: the ranks among which
  /// matrices are divided; null: none. Collective.
  ParameterUpdate(const Parameters&, AccumulatingSink&, const optimizer::Settings&, const parallel::Grid&,
                  const kernels::Execution&, Buffers&&, bool overlap = false, TensorAxis* tensor = nullptr,
                  GatheredWeights gathered = GatheredWeights::all, const WeightSlots* slots = nullptr);

  /// Adds up the gradients of all ranks of the data axis, and partial ones of the tensor axis: in owned rows and in the
  /// vectors. Collective.
  void reduce();
  /// *flags.not_finite |= 1 if a gradient is not finite, on all ranks. Collective.
  void form_norm(kernels::StepFlags* flags);
  /// No effect if the step is withheld. Weights of rows that other ranks own arrive in the next step (DataParallel).
  /// Collective. `scale`: of the loss whose gradients these are; null: it is not scaled.
  void apply(kernels::AdamStep* step, const kernels::LossScale* scale = nullptr);

  /// Norm of the gradient of the last step before clipping, in memory where the kernels run.
  const double* norm() const { return buffers_.norm.data + 1; }
  DataParallel& exchange() { return exchange_; }
  const DataParallel& exchange() const { return exchange_; }

 private:
  const Parameters& parameters_;
  AccumulatingSink& gradients_;
  const optimizer::Settings settings_;
  const kernels::Execution execution_;
  Buffers buffers_;
  DataParallel exchange_;
  TensorAxis* const tensor_;
  std::optional<StateStream> state_;  // in host memory
};

}  // namespace weft::model

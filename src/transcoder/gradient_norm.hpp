// SPDX-License-Identifier: Apache-2.0
//
// The norm of the gradient over all parameters and ranks, and clipping by it. All of it stays where the kernels run.
//
// The backward kernels leave the squared norm of each decoder and encoder row that a rank updates; encoder biases count
// with their encoder row. Every rank has the whole gradients of the decoder bias and of the skip connection: world rank
// 0 counts them.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/optimize/parameters.hpp"
#include "optimizer/settings.hpp"
#include "parallel/device_communicator.hpp"
#include "training/step_arena.hpp"

namespace weft::transcoder {

class GradientNorm {
 public:
  struct Buffers {
    Buffers() = default;
    /// n_keys: layers times features per layer that the largest rank updates. n_whole: rows of gradients that every
    /// rank has whole.
    Buffers(const optimizer::Settings&, std::int64_t n_keys, std::int64_t n_whole, training::StepArena&);
    kernels::Array<double> norm;  ///< [1], of the last step that updated, before clipping; 0 when not formed
    // With clipping only:
    kernels::Array<double> rows;       ///< [2 * n_keys] squared: decoder rows, then encoder rows
    kernels::Array<double> whole;      ///< [n_whole] squared, likewise
    kernels::Array<double> sums;       ///< [3] squared: all rows, all of `whole`, both
    kernels::Array<double> workspace;  ///< of the sum over rows
  };

  /// n_keys: of this rank. `world` must outlive this object.
  GradientNorm(const optimizer::Settings&, std::int64_t n_keys, parallel::DeviceCommunicator& world,
               const kernels::Execution&, const Buffers&);

  /// True if gradients are clipped. If not, no norm is formed.
  bool clips() const { return settings_.clip_norm > 0; }
  /// True if the norm is formed by a pass of its own before the update (exact), false if from the update itself, for
  /// the next step (previous).
  bool is_exact() const { return settings_.clip_mode == optimizer::ClipMode::exact; }

  /// Squared norms by row, for the backward kernels: [n_keys]; empty without clipping.
  kernels::Array<double> decoder_rows() const;
  kernels::Array<double> encoder_rows() const;
  /// The gradients that every rank has whole.
  void set_whole(std::span<const kernels::Matrix<const float>> gradients);
  /// Forms `norm` from the above, unless the step is withheld. rows_are_scaled: the rows hold the clipped gradient.
  /// Collective.
  void form(bool rows_are_scaled, const kernels::AdamStep* step);
  /// Sets the gradient scale of the step.
  void clip(kernels::AdamStep* step);

  double* norm() const { return buffers_.norm.data; }

 private:
  const optimizer::Settings settings_;
  const std::int64_t n_keys_;
  parallel::DeviceCommunicator& world_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder

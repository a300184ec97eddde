// SPDX-License-Identifier: Apache-2.0
//
// The norm of the gradient over all parameters and ranks, and clipping by it. All of it stays where the kernels run.
//
// The backward kernels leave the squared norm of each decoder and encoder row that a rank updates; encoder biases and
// thresholds count with their encoder row. Every rank has the whole gradients of the decoder bias and of the skip
// connection: world rank 0 counts them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/optimize/parameter_rows.hpp"
#include "optimizer/settings.hpp"
#include "parallel/device_communicator.hpp"
#include "training/step_arena.hpp"

namespace weft::transcoder {

class Clipping {
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
  Clipping(const optimizer::Settings&, std::int64_t n_keys, parallel::DeviceCommunicator& world,
           const kernels::Execution&, const Buffers&);

  /// True if gradients are clipped. If not, no norm is formed, and the functions below do nothing.
  bool active() const { return settings_.clip_norm > 0; }
  /// Squared norms by row, for the backward kernels: [n_keys]; empty without clipping.
  kernels::Array<double> decoder_rows() const;
  kernels::Array<double> encoder_rows() const;

  /// Before the update: sets the gradient scale of the step by the norm of this step, for which `form_squares` leaves
  /// the squared norms of all rows (clip_mode = "exact"), or by that of the step before ("previous"). whole: the
  /// gradients that every rank has whole. Collective.
  void before_update(std::span<const kernels::Matrix<const float>> whole, const std::function<void()>& form_squares,
                     kernels::AdamStep* step);
  /// After it, with "previous": forms the norm for the next step, from rows of the clipped gradient. Collective.
  void after_update(const kernels::AdamStep* step);

  /// The norm of the last step that updated, before clipping. It is part of checkpoints.
  double* norm() const { return buffers_.norm.data; }

 private:
  bool is_exact() const { return settings_.clip_mode == optimizer::ClipMode::exact; }
  void set_whole(std::span<const kernels::Matrix<const float>> gradients);
  void form(bool rows_are_scaled, const kernels::AdamStep* step);

  const optimizer::Settings settings_;
  const std::int64_t n_keys_;
  parallel::DeviceCommunicator& world_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder

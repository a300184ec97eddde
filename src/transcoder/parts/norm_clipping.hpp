// SPDX-License-Identifier: Apache-2.0
//
// The norm of the gradient over all parameters and ranks, and clipping by it. All values stay in memory of the kernels.
//
// The backward kernels store the squared norm of each decoder and encoder row that a rank updates; encoder biases and
// thresholds count with their encoder row. Every rank has the complete gradients of the decoder bias and of the skip
// connection: world rank 0 counts them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/optimize/parameter_rows.hpp"
#include "model/step_arena.hpp"
#include "optimizer/optimizer_settings.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::transcoder {

class Clipping {
 public:
  struct Buffers {
    Buffers() = default;
    /// n_keys: layers times features per layer that the largest rank updates. n_whole: rows of gradients that are
    /// complete on every rank.
    Buffers(const optimizer::Settings&, std::int64_t n_keys, std::int64_t n_whole, model::StepArena&);
    kernels::Array<double> norm;  ///< [1] norm of the last step that updated, before clipping; 0 when not formed
    // Buffers that only clipping needs:
    kernels::Array<double> rows;       ///< [2 * n_keys] squared norms: decoder rows, then encoder rows
    kernels::Array<double> whole;      ///< [n_whole] squared norms of complete gradients
    kernels::Array<double> sums;       ///< [3] squared norms: all rows, all of `whole`, both
    kernels::Array<double> workspace;  ///< workspace of the sum over rows
  };

  /// n_keys: keys of this rank. `world` must outlive this object.
  Clipping(const optimizer::Settings&, std::int64_t n_keys, parallel::DeviceCommunicator& world,
           const kernels::Execution&, const Buffers&);

  /// True if gradients are clipped. If not, no norm is formed, and the functions below do nothing.
  bool active() const { return settings_.clip_norm > 0; }
  /// Squared norms by row, for the backward kernels: [n_keys]; empty without clipping.
  kernels::Array<double> decoder_rows() const;
  kernels::Array<double> encoder_rows() const;

  /// Sets the gradient scale of the step before the update, by the norm of this step, for which `form_squares` stores
  /// the squared norms of all rows (clip_mode = "exact"), or by the norm of the previous step ("previous"). whole: the
  /// gradients that are complete on every rank. Collective.
  void before_update(std::span<const kernels::Matrix<const float>> whole, const std::function<void()>& form_squares,
                     kernels::AdamStep* step);
  /// Forms the norm for the next step after the update, from rows of the clipped gradient ("previous" only).
  /// Collective.
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

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/norm_clipping.hpp"

#include <algorithm>

#include "kernels/optimize/guard.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::transcoder {

Clipping::Buffers::Buffers(const optimizer::Settings& settings, std::int64_t n_keys, std::int64_t n_whole,
                           model::StepArena& arena)
    : norm(arena.take<double>(1)) {
  if (settings.clip_norm <= 0) return;
  rows = arena.take<double>(2 * n_keys);
  whole = arena.take<double>(n_whole);
  sums = arena.take<double>(3);
  workspace = arena.take<double>(kernels::total_workspace(std::max(2 * n_keys, n_whole)));
}

Clipping::Clipping(const optimizer::Settings& settings, std::int64_t n_keys, parallel::DeviceCommunicator& world,
                   const kernels::Execution& execution, const Buffers& buffers)
    : settings_(settings), n_keys_(n_keys), world_(world), execution_(execution), buffers_(buffers) {
  device::zero(execution, buffers_.norm);
}

kernels::Array<double> Clipping::decoder_rows() const {
  return active() ? kernels::Array<double>{buffers_.rows.data, n_keys_} : kernels::Array<double>{};
}
kernels::Array<double> Clipping::encoder_rows() const {
  return active() ? kernels::Array<double>{buffers_.rows.data + n_keys_, n_keys_} : kernels::Array<double>{};
}

void Clipping::set_whole(std::span<const kernels::Matrix<const float>> gradients) {
  device::zero(execution_, buffers_.whole);
  double* row = buffers_.whole.data;
  for (const kernels::Matrix<const float>& gradient : gradients) {
    if (world_.rank() == 0) kernels::add_row_norms(execution_, gradient, {row, gradient.rows});
    row += gradient.rows;
  }
  kernels::total(execution_, buffers_.whole, buffers_.workspace, buffers_.sums.data + 1);
}

void Clipping::form(bool rows_are_scaled, const kernels::AdamStep* step) {
  double *const rows = buffers_.sums.data, *const whole = rows + 1, *const all = rows + 2;
  kernels::total(execution_, {buffers_.rows.data, 2 * n_keys_}, buffers_.workspace, rows);
  kernels::join_norms(execution_, rows, rows_are_scaled, whole, step, all);
  world_.sum(kernels::Array<double>{all, 1}, "norms");
  kernels::keep_norm(execution_, all, step, norm());
}

void Clipping::before_update(std::span<const kernels::Matrix<const float>> whole,
                             const std::function<void()>& form_squares, kernels::AdamStep* step) {
  if (!active()) return;
  set_whole(whole);
  if (is_exact()) {
    form_squares();
    form(false, step);
  }
  kernels::clip_to_norm(execution_, norm(), settings_.clip_norm, step);
}

void Clipping::after_update(const kernels::AdamStep* step) {
  if (active() && !is_exact()) form(true, step);
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/gradient_norm.hpp"

#include <algorithm>

#include "kernels/optimize/guard.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::transcoder {

GradientNorm::Buffers::Buffers(const optimizer::Settings& settings, std::int64_t n_keys, std::int64_t n_whole,
                               training::StepArena& arena)
    : norm(arena.take<double>(1)) {
  if (settings.clip_norm <= 0) return;
  rows = arena.take<double>(2 * n_keys);
  whole = arena.take<double>(n_whole);
  sums = arena.take<double>(3);
  workspace = arena.take<double>(kernels::total_workspace(std::max(2 * n_keys, n_whole)));
}

GradientNorm::GradientNorm(const optimizer::Settings& settings, std::int64_t n_keys,
                           parallel::DeviceCommunicator& world, const kernels::Execution& execution,
                           const Buffers& buffers)
    : settings_(settings), n_keys_(n_keys), world_(world), execution_(execution), buffers_(buffers) {
  device::zero(execution, buffers_.norm);
}

kernels::Array<double> GradientNorm::decoder_rows() const {
  return clips() ? kernels::Array<double>{buffers_.rows.data, n_keys_} : kernels::Array<double>{};
}
kernels::Array<double> GradientNorm::encoder_rows() const {
  return clips() ? kernels::Array<double>{buffers_.rows.data + n_keys_, n_keys_} : kernels::Array<double>{};
}

void GradientNorm::set_whole(std::span<const kernels::Matrix<const float>> gradients) {
  device::zero(execution_, buffers_.whole);
  double* row = buffers_.whole.data;
  for (const kernels::Matrix<const float>& gradient : gradients) {
    if (world_.rank() == 0) kernels::add_row_norms(execution_, gradient, {row, gradient.rows});
    row += gradient.rows;
  }
  kernels::total(execution_, buffers_.whole, buffers_.workspace, buffers_.sums.data + 1);
}

void GradientNorm::form(bool rows_are_scaled, const kernels::AdamStep* step) {
  double *const rows = buffers_.sums.data, *const whole = rows + 1, *const all = rows + 2;
  kernels::total(execution_, {buffers_.rows.data, 2 * n_keys_}, buffers_.workspace, rows);
  kernels::join_norms(execution_, rows, rows_are_scaled, whole, step, all);
  world_.sum(kernels::Array<double>{all, 1}, "norms");
  kernels::keep_norm(execution_, all, step, norm());
}

void GradientNorm::clip(kernels::AdamStep* step) {
  kernels::clip_to_norm(execution_, norm(), settings_.clip_norm, step);
}

}  // namespace weft::transcoder

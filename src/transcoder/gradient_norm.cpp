// SPDX-License-Identifier: Apache-2.0
#include "transcoder/gradient_norm.hpp"

#include "kernels/optimize/guard.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::transcoder {

GradientNorm::Buffers::Buffers(const optimizer::Settings& settings, std::int64_t n_keys, training::StepArena& arena)
    : norm(arena.take<double>(1)) {
  if (settings.clip_norm <= 0) return;
  rows = arena.take<double>(2 * n_keys);
  sums = arena.take<double>(3);
  workspace = arena.take<double>(kernels::total_workspace(2 * n_keys));
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

void GradientNorm::set_decoder_bias(kernels::Array<const float> gradient) {
  const kernels::Array<double> sum{buffers_.sums.data + 1, 1};
  device::zero(execution_, sum);
  if (world_.rank() == 0) kernels::add_row_norms(execution_, {gradient.data, 1, gradient.size, gradient.size}, sum);
}

void GradientNorm::form(bool rows_are_scaled, const kernels::AdamStep* step) {
  double *const rows = buffers_.sums.data, *const bias = rows + 1, *const all = rows + 2;
  kernels::total(execution_, {buffers_.rows.data, 2 * n_keys_}, buffers_.workspace, rows);
  kernels::join_norms(execution_, rows, rows_are_scaled, bias, step, all);
  world_.sum(kernels::Array<double>{all, 1}, "norms");
  kernels::keep_norm(execution_, all, step, norm());
}

void GradientNorm::clip(kernels::AdamStep* step) {
  kernels::clip_to_norm(execution_, norm(), settings_.clip_norm, step);
}

}  // namespace weft::transcoder

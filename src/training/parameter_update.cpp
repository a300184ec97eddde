// SPDX-License-Identifier: Apache-2.0
#include "training/parameter_update.hpp"

#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::training {

ParameterUpdate::Buffers::Buffers(std::int64_t elements, StepArena& arena, const StateStream::Buffers& state)
    : squares(arena.take<double>(elements / AccumulatingSink::kRow)),
      workspace(arena.take<double>(kernels::total_workspace(elements / AccumulatingSink::kRow))),
      norm(arena.take<double>(2)),
      state(state) {}

ParameterUpdate::ParameterUpdate(const Parameters& parameters, const AccumulatingSink& gradients,
                                 const optimizer::Settings& settings, const kernels::Execution& execution,
                                 const Buffers& buffers)
    : parameters_(parameters), gradients_(gradients), settings_(settings), execution_(execution), buffers_(buffers) {
  device::zero(execution, buffers_.norm);
  if (parameters.moments() == Moments::on_host) state_.emplace(execution, buffers_.state);
}

void ParameterUpdate::form_norm(kernels::StepFlags* flags) {
  device::zero(execution_, buffers_.squares);
  kernels::add_row_norms(execution_, gradients_.all(), buffers_.squares);
  kernels::total(execution_, buffers_.squares, buffers_.workspace, buffers_.norm.data);
  // The square of an fp32 number is finite in fp64: a sum that is not has a term that is not.
  kernels::flag_not_finite(execution_, buffers_.norm.data, &flags->not_finite);
}

void ParameterUpdate::apply(kernels::AdamStep* step, const kernels::LossScale* scale) {
  kernels::unscale_and_clip(execution_, buffers_.norm.data, settings_.clip_norm, scale, buffers_.norm.data + 1, step);
  if (state_) state_->begin();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_.specs()[i].is_matrix())
      kernels::adam_vector(execution_, parameters_.owned_vector(i), gradients_.vector(i), step);
    else if (state_)
      state_->update(parameters_.owned_matrix(i), gradients_.matrix(i), step);
    else
      kernels::adam_rows(execution_, parameters_.owned_matrix(i), 0, gradients_.matrix(i), step);
  }
  if (state_) state_->end();
}

}  // namespace weft::training

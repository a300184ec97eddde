// SPDX-License-Identifier: Apache-2.0
#include "training/parameter_update.hpp"

#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::training {

ParameterUpdate::Buffers::Buffers(std::int64_t elements, StepArena& arena)
    : squares(arena.take<double>(elements / AccumulatingSink::kRow)),
      workspace(arena.take<double>(kernels::total_workspace(elements / AccumulatingSink::kRow))),
      norm(arena.take<double>(2)) {}

ParameterUpdate::ParameterUpdate(const Parameters& parameters, const AccumulatingSink& gradients,
                                 const optimizer::Settings& settings, const kernels::Execution& execution,
                                 const Buffers& buffers)
    : parameters_(parameters), gradients_(gradients), settings_(settings), execution_(execution), buffers_(buffers) {
  device::zero(execution, buffers_.norm);
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
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_.specs()[i].is_matrix())
      kernels::adam_rows(execution_, parameters_.owned_matrix(i), 0, gradients_.matrix(i), step);
    else
      kernels::adam_vector(execution_, parameters_.owned_vector(i), gradients_.vector(i), step);
  }
}

}  // namespace weft::training

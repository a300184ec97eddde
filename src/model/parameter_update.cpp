// SPDX-License-Identifier: Apache-2.0
#include "model/parameter_update.hpp"

#include <limits>

#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::model {

ParameterUpdate::Buffers::Buffers(std::int64_t elements, StepArena& arena, const StateStream::Buffers& state,
                                  DataParallel::Buffers&& exchange)
    : squares(arena.take<double>(elements / AccumulatingSink::kRow)),
      workspace(arena.take<double>(kernels::total_workspace(elements / AccumulatingSink::kRow))),
      norm(arena.take<double>(2)),
      state(state),
      exchange(std::move(exchange)) {}

ParameterUpdate::ParameterUpdate(const Parameters& parameters, AccumulatingSink& gradients,
                                 const optimizer::Settings& settings, const parallel::Grid& grid,
                                 const kernels::Execution& execution, Buffers&& buffers, bool overlap,
                                 TensorAxis* tensor, GatheredWeights gathered, const WeightSlots* slots)
    : parameters_(parameters),
      gradients_(gradients),
      settings_(settings),
      execution_(execution),
      buffers_(std::move(buffers)),
      exchange_(parameters, gradients, grid, execution, std::move(buffers_.exchange), overlap, gathered, slots),
      tensor_(tensor) {
  device::zero(execution, buffers_.norm);
  if (parameters.moments() == Moments::on_host) state_.emplace(execution, buffers_.state);
}

void ParameterUpdate::reduce() {
  exchange_.reduce();
  if (const kernels::Array<float> partial = gradients_.partial_vectors(); tensor_ != nullptr && partial.size > 0)
    kernels::sum_rows(
        execution_, {tensor_->gather(partial, "gradients").data, tensor_->size(), partial.size, partial.size}, partial);
}

void ParameterUpdate::form_norm(kernels::StepFlags* flags) {
  device::zero(execution_, buffers_.squares);
  const kernels::Matrix<const float> matrices = gradients_.matrix_rows(), vectors = gradients_.vector_rows();
  kernels::add_row_norms(execution_, matrices, {buffers_.squares.data, matrices.rows});
  if (exchange_.is_first())  // all ranks have them
    kernels::add_row_norms(execution_, vectors, {buffers_.squares.data + matrices.rows, vectors.rows});
  if (tensor_ != nullptr && tensor_->rank() > 0)  // rank 0 counts them
    for (const parallel::Range& rows : gradients_.repeated_rows())
      device::zero(execution_, buffers_.squares.data + rows.begin, 8 * rows.size());
  kernels::total(execution_, buffers_.squares, buffers_.workspace, buffers_.norm.data);
  if (exchange_.active()) exchange_.sum({buffers_.norm.data, 1}, "norm of gradients");
  if (tensor_ != nullptr) tensor_->sum({buffers_.norm.data, 1}, "norm of gradients");
  // The square of an fp32 number is finite in fp64: a sum that is not has a term that is not.
  kernels::flag_above(execution_, {buffers_.norm.data, 1}, std::numeric_limits<double>::max(), &flags->not_finite);
}

void ParameterUpdate::apply(kernels::AdamStep* step, const kernels::LossScale* scale) {
  kernels::unscale_and_clip(execution_, buffers_.norm.data, settings_.clip_norm, scale, buffers_.norm.data + 1, step);
  if (state_) state_->begin();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSpec& spec = parameters_.specs()[i];
    if (spec.frozen) continue;
    if (!spec.is_matrix())
      kernels::adam_vector(execution_, parameters_.owned_vector(i), gradients_.vector(i), step);
    else if (state_)
      state_->update(parameters_.owned_matrix(i), gradients_.matrix(i), step);
    else
      kernels::adam_rows(execution_, parameters_.owned_matrix(i), 0, gradients_.matrix(i), step);
  }
  if (state_) state_->end();
}

}  // namespace weft::model

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/step/reconstruction_loss.hpp"

#include "device/memory.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/loss/loss.hpp"

namespace weft::transcoder {

Loss::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                       model::StepArena& arena) {
  const FeatureAxisSizes sizes(configuration, shape, grid, configuration.data.batch_tokens);
  arena.purpose("backward pass");
  targets = arena.take<float>(sizes.own * sizes.width);
  part_sums = arena.take<double>(3 * shape.n_layers);
  step_sums = arena.take<double>(4 * shape.n_layers);
  workspace = arena.take<std::byte>(kernels::loss_workspace(sizes.own, shape.n_layers));
}

Loss::Loss(const Model& model, const NormalisationOnDevice& normalisation, const Forward& forward,
           const GradientRows& gradient_rows, const kernels::Execution& execution, run::Timers& timers,
           const Buffers& buffers)
    : model_(model),
      normalisation_(normalisation),
      forward_(forward),
      gradient_rows_(gradient_rows),
      execution_(execution),
      timers_(timers),
      buffers_(buffers) {
  device::zero(execution, buffers_.step_sums);
}

void Loss::load(kernels::AnyMatrix targets) {
  const std::int64_t width = model_.shape().width();
  kernels::normalise_rows(execution_, targets, normalisation_.target_mean.array(), normalisation_.target_scale.array(),
                          {buffers_.targets.data, kernels::Scalar::fp32, targets.rows, width, width},
                          forward_.not_finite());
}

void Loss::begin() {
  device::zero(execution_, buffers_.step_sums);
  at_once_ = false;  // a rank without tokens of this batch gets no part
}

void Loss::add(const Forward::OwnPart& part, kernels::Array<const float> error_weights) {
  timers_.phase("loss");
  const std::int64_t n = model_.shape().n_layers, d = model_.shape().d_model, width = model_.shape().width();
  const std::int64_t first = part.layers.begin * d, columns = part.layers.size() * d, m = part.layers.size();
  const auto of_layers = [&](const float* all) { return kernels::Array<const float>{all + first, columns}; };
  const kernels::AnyMatrix targets{buffers_.targets.data, kernels::Scalar::fp32, forward_.layout().own.size(), width,
                                   width};
  const kernels::AnyMatrix of_part = targets.rows_from(part.begin, part.count).columns_from(first, columns);
  const kernels::Array<const float> bias = of_layers(model_.decoder_bias().weight.data),
                                    centre = of_layers(normalisation_.centre.data()),
                                    standardise = of_layers(normalisation_.standardise.data());
  double *const of_first = buffers_.part_sums.data + part.layers.begin, *const step_sums = buffers_.step_sums.data;
  const kernels::LossSums sums{{of_first, m}, {of_first + n, m}, {of_first + 2 * n, m}};
  if (error_weights.size > 0)
    kernels::weighted_residual_and_loss(execution_, part.partial, part.n_parts, of_part, bias, centre, standardise,
                                        of_layers(error_weights.data), m, gradient_rows_.factor(),
                                        gradient_rows_.own(part), sums, buffers_.workspace);
  else
    kernels::residual_and_loss(execution_, part.partial, part.n_parts, of_part, bias, centre, standardise, m,
                               gradient_rows_.factor(), gradient_rows_.own(part), sums, buffers_.workspace);
  at_once_ = part.count == forward_.layout().own.size();
  for (std::int64_t sum = 0; sum < 3 && !at_once_; ++sum)
    kernels::accumulate(execution_, {of_first + sum * n, m}, {step_sums + sum * n + part.layers.begin, m});
}

void Loss::finish() {
  const std::int64_t n = model_.shape().n_layers;
  if (at_once_) kernels::accumulate(execution_, {buffers_.part_sums.data, 3 * n}, {buffers_.step_sums.data, 3 * n});
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
#include "transcoder/parts/skip_gradient.hpp"

#include "kernels/gemm/gemm.hpp"
#include "kernels/optimize/adam.hpp"

namespace weft::transcoder {

SkipGradient::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape&,
                               model::StepArena& arena) {
  const kernels::Scalar scalar = scalar_of(configuration.precision);
  arena.purpose("backward pass");
  gradient = arena.take<float>(shape.width() * shape.d_model);
  workspace = arena.take<std::byte>(kernels::gemm_workspace(scalar, scalar, kernels::Scalar::fp32, shape.d_model,
                                                            shape.d_model, configuration.data.batch_tokens));
}

SkipGradient::SkipGradient(PartContext& context)
    : model_(context.model),
      forward_(context.forward),
      gradient_rows_(context.gradient_rows),
      timers_(context.timers),
      execution_(context.execution),
      buffers_(context.configuration, model_.shape(), context.grid.shape(), context.arena),
      gradient_{buffers_.gradient.data, model_.shape().width(), model_.shape().d_model, model_.shape().d_model} {}

void SkipGradient::before_backward(BackwardPass& pass) {
  timers_.phase("skip");
  const kernels::AnyMatrix x = forward_.all_inputs(), g = gradient_rows_.all();
  const std::int64_t d = gradient_.columns;
  const kernels::AnyMatrix all{gradient_.data, kernels::Scalar::fp32, gradient_.rows, d, d};
  // One call forms all layers: the product of one layer has too few tiles for a large GPU.
  kernels::gemm_batched(pass.communication, 1.0f, g.columns_from(0, d), kernels::Form::transposed, x.columns_from(0, d),
                        kernels::Form::plain, 0.0f, all.rows_from(0, d),
                        {.count = gradient_.rows / d, .a = d, .b = d, .c = d * d}, buffers_.workspace);
  pass.whole.push_back(gradient_);
}

void SkipGradient::update(BackwardPass& pass) {
  if (pass.step == nullptr) return;
  timers_.phase("skip");
  const std::int64_t d = gradient_.columns;
  for (std::size_t t = 0; t < model_.skip().size(); ++t)
    kernels::adam_rows(execution_, model_.skip()[t], 0, {gradient_.row(static_cast<std::int64_t>(t) * d), d, d, d},
                       pass.step);
}

}  // namespace weft::transcoder

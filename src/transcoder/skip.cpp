// SPDX-License-Identifier: Apache-2.0
#include "transcoder/skip.hpp"

#include "kernels/gemm/gemm.hpp"
#include "kernels/optimize/adam.hpp"
#include "transcoder/exchange/feature_axis.hpp"

namespace weft::transcoder {
namespace {

using kernels::AnyMatrix;
using kernels::Form;
using kernels::Scalar;

}  // namespace

std::int64_t add_skip_workspace(const Configuration& configuration, const Shape& shape, kernels::Backend backend,
                                std::int64_t n_tokens) {
  if (!shape.skip) return 0;
  const Scalar scalar = scalar_of(configuration.precision);
  return kernels::gemm_workspace(
      scalar, kernels::product_type(configuration.optimizer.state, backend == kernels::Backend::cuda), scalar, n_tokens,
      shape.d_model, shape.d_model);
}

std::int64_t skip_gradient_workspace(const Configuration& configuration, const Shape& shape, std::int64_t n_tokens) {
  if (!shape.skip) return 0;
  const Scalar scalar = scalar_of(configuration.precision);
  return kernels::gemm_workspace(scalar, scalar, Scalar::fp32, shape.d_model, shape.d_model, n_tokens);
}

void add_skip(const kernels::Execution& execution, std::span<const kernels::ParameterRows> skip, AnyMatrix x,
              parallel::Range layers, AnyMatrix reconstruction, kernels::Array<std::byte> workspace) {
  const std::int64_t d = reconstruction.columns / layers.size();
  for (std::int64_t t = layers.begin; t < layers.end; ++t)
    kernels::gemm(execution, 1.0f, x.columns_from(t * d, d), Form::plain,
                  kernels::product_weights(skip[static_cast<std::size_t>(t)]), Form::transposed, 1.0f,
                  reconstruction.columns_from((t - layers.begin) * d, d), workspace);
}

void skip_gradient(const kernels::Execution& execution, AnyMatrix x, AnyMatrix gradient_rows,
                   kernels::Matrix<float> gradient, kernels::Array<std::byte> workspace) {
  const std::int64_t d = gradient.columns;
  const AnyMatrix all{gradient.data, Scalar::fp32, gradient.rows, d, gradient.stride};
  // One call for all layers: the product of one has too few tiles for a large GPU.
  kernels::gemm_batched(execution, 1.0f, gradient_rows.columns_from(0, d), Form::transposed, x.columns_from(0, d),
                        Form::plain, 0.0f, all.rows_from(0, d),
                        {.count = gradient.rows / d, .a = d, .b = d, .c = d * gradient.stride}, workspace);
}

void update_skip(const kernels::Execution& execution, std::span<const kernels::ParameterRows> skip,
                 kernels::Matrix<const float> gradient, const kernels::AdamStep* step) {
  const std::int64_t d = gradient.columns;
  for (std::size_t t = 0; t < skip.size(); ++t)
    kernels::adam_rows(execution, skip[t], 0, {gradient.row(static_cast<std::int64_t>(t) * d), d, d, d}, step);
}

}  // namespace weft::transcoder

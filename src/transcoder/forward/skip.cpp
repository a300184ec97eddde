// SPDX-License-Identifier: Apache-2.0
#include "transcoder/forward/skip.hpp"

#include "kernels/gemm/gemm.hpp"
#include "transcoder/axes/feature_axis.hpp"

namespace weft::transcoder {

std::int64_t add_skip_workspace(const Configuration& configuration, const Shape& shape, kernels::Backend backend,
                                std::int64_t n_tokens) {
  if (!shape.skip) return 0;
  const kernels::Scalar scalar = scalar_of(configuration.precision);
  return kernels::gemm_workspace(
      scalar, kernels::product_type(configuration.optimizer.state, backend == kernels::Backend::cuda), scalar, n_tokens,
      shape.d_model, shape.d_model);
}

void add_skip(const kernels::Execution& execution, std::span<const kernels::ParameterRows> skip, kernels::AnyMatrix x,
              parallel::Range layers, kernels::AnyMatrix reconstruction, kernels::Array<std::byte> workspace) {
  const std::int64_t d = reconstruction.columns / layers.size();
  for (std::int64_t t = layers.begin; t < layers.end; ++t)
    kernels::gemm(execution, 1.0f, x.columns_from(t * d, d), kernels::Form::plain,
                  kernels::product_weights(skip[static_cast<std::size_t>(t)]), kernels::Form::transposed, 1.0f,
                  reconstruction.columns_from((t - layers.begin) * d, d), workspace);
}

}  // namespace weft::transcoder

// SPDX-License-Identifier: Apache-2.0
//
// The forward product through gemm; the backward pass connects backward_portable.cpp and backward_cuda.cu.
#include "kernels/transcoder/encode/encode.hpp"

#include "base/error.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/gemm/gemm.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::encode_backward_workspace) encode_backward_workspace;
decltype(kernels::encode_backward_update) encode_backward_update;
decltype(kernels::encode_backward_norm) encode_backward_norm;
}  // namespace portable

namespace cuda {
decltype(kernels::encode_backward_workspace) encode_backward_workspace;
decltype(kernels::encode_backward_update) encode_backward_update;
decltype(kernels::encode_backward_norm) encode_backward_norm;
}  // namespace cuda

std::int64_t encode_workspace(Backend backend, std::int64_t n_tokens, std::int64_t n_features, std::int64_t d_model,
                              Scalar input, StatePolicy policy, Scalar product) {
  // The CUDA backend keeps fp32 weights as two planes.
  return gemm_workspace(input, product_type(policy, backend == Backend::cuda), product, n_tokens, n_features, d_model);
}

void encode_tile(const Execution& execution, AnyMatrix x, const ParameterRows& encoder, std::int64_t row_begin,
                 AnyMatrix product, Array<std::byte> workspace) {
  if (product.rows == 0 || product.columns == 0) return;
  if (x.type == Scalar::fp32 && encoder.weight_rest != nullptr)
    throw Error(ExitCode::internal,
                "encode_tile: fp32 inputs with the bf16 plane of fp32 weights (only bf16 inputs are supported)");
  gemm(execution, 1.0f, x, Form::plain, product_weights(encoder).rows_from(row_begin, product.columns),
       Form::transposed, 0.0f, product, workspace);
}

std::int64_t encode_backward_workspace(Backend backend, std::int64_t n_layers, std::int64_t n_features,
                                       std::int64_t d_model, std::int64_t capacity) {
  return dispatch<portable::encode_backward_workspace, cuda::encode_backward_workspace>(backend, n_layers, n_features,
                                                                                        d_model, capacity);
}

void encode_backward_update(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                            AnyMatrix x, Array<const float> preactivation_gradient,
                            std::span<const ParameterRows> encoder, std::span<const ParameterVector> bias,
                            const AdamStep* step, Array<double> squared_norm, Array<std::byte> workspace) {
  dispatch<portable::encode_backward_update, cuda::encode_backward_update>(
      execution, activations, hits, x, preactivation_gradient, encoder, bias, step, squared_norm, workspace);
}

void encode_backward_norm(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                          AnyMatrix x, Array<const float> preactivation_gradient, Array<double> squared_norm,
                          Array<std::byte> workspace) {
  dispatch<portable::encode_backward_norm, cuda::encode_backward_norm>(execution, activations, hits, x,
                                                                       preactivation_gradient, squared_norm, workspace);
}

}  // namespace weft::kernels

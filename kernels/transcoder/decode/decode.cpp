// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in decode_portable.cpp and {forward,decode}_cuda.cu.
#include "kernels/transcoder/decode/decode.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::decode_forward) decode_forward;
decltype(kernels::decoder_norms) decoder_norms;
decltype(kernels::decode_backward_workspace) decode_backward_workspace;
decltype(kernels::decode_backward_update) decode_backward_update;
decltype(kernels::decode_backward_norm) decode_backward_norm;
}  // namespace portable

namespace cuda {
decltype(kernels::decode_forward) decode_forward;
decltype(kernels::decoder_norms) decoder_norms;
decltype(kernels::decode_backward_workspace) decode_backward_workspace;
decltype(kernels::decode_backward_update) decode_backward_update;
decltype(kernels::decode_backward_norm) decode_backward_norm;
}  // namespace cuda

void decode_forward(const Execution& execution, const SparseActivations& activations, std::int64_t token_begin,
                    std::int64_t token_count, std::span<const ParameterRows> decoder, std::int64_t target_begin,
                    AnyMatrix y) {
  dispatch<portable::decode_forward, cuda::decode_forward>(execution, activations, token_begin, token_count, decoder,
                                                           target_begin, y);
}

void decoder_norms(const Execution& execution, std::span<const ParameterRows> decoder, Array<float> norm) {
  dispatch<portable::decoder_norms, cuda::decoder_norms>(execution, decoder, norm);
}

std::int64_t decode_backward_workspace(Backend backend, std::int64_t n_layers, std::int64_t n_features,
                                       std::int64_t d_model, std::int64_t capacity, bool norms) {
  return dispatch<portable::decode_backward_workspace, cuda::decode_backward_workspace>(backend, n_layers, n_features,
                                                                                        d_model, capacity, norms);
}

void decode_backward_update(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                            AnyMatrix gradient_rows, std::span<const ParameterRows> decoder, const AdamStep* step,
                            Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
                            const LateRows& late, Array<const float> factors, Array<float> new_norms) {
  dispatch<portable::decode_backward_update, cuda::decode_backward_update>(
      execution, activations, hits, gradient_rows, decoder, step, activation_gradient, squared_norm, workspace, late,
      factors, new_norms);
}

void decode_backward_norm(const Execution& execution, const SparseActivations& activations, const FeatureHits& hits,
                          AnyMatrix gradient_rows, std::span<const ParameterRows> decoder,
                          Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
                          const LateRows& late, Array<const float> factors) {
  dispatch<portable::decode_backward_norm, cuda::decode_backward_norm>(execution, activations, hits, gradient_rows,
                                                                       decoder, activation_gradient, squared_norm,
                                                                       workspace, late, factors);
}

}  // namespace weft::kernels

// SPDX-License-Identifier: Apache-2.0
//
// The encoder's backward pass of encode.hpp on NVIDIA GPUs.
#pragma once

#include <span>

#include "kernels/transcoder/encode/encode.hpp"

namespace weft::kernels::cuda {

/// Bytes of workspace of encode_backward_update and encode_backward_norm; capacity as SparseActivations::key.size.
std::int64_t encode_backward_workspace(std::int64_t n_layers, std::int64_t n_features, std::int64_t d_model,
                                       std::int64_t capacity);

void encode_backward_update(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix x,
                            Array<const float> preactivation_gradient, std::span<const ParameterRows> encoder,
                            std::span<const ParameterVector> bias, const AdamStep* step, Array<double> squared_norm,
                            Array<std::byte> workspace);

void encode_backward_norm(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix x,
                          Array<const float> preactivation_gradient, Array<double> squared_norm,
                          Array<std::byte> workspace);

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The decoder of decode.hpp on NVIDIA GPUs. fp32 weights are two planes (ParameterRows::weight_rest): the forward pass
// and the activation gradient read the bf16 plane, the optimizer both.
#pragma once

#include <span>

#include "kernels/transcoder/decode/decode.hpp"

namespace weft::kernels::cuda {

void decode_forward(const Execution&, const SparseActivations&, std::int64_t token_begin, std::int64_t token_count,
                    std::span<const ParameterRows> decoder, std::int64_t target_begin, AnyMatrix y);

/// Bytes of workspace of the two backward passes; capacity as SparseActivations::key.size.
std::int64_t decode_backward_workspace(std::int64_t n_layers, std::int64_t n_features, std::int64_t d_model,
                                       std::int64_t capacity);

void decode_backward_update(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix gradient_rows,
                            std::span<const ParameterRows> decoder, const AdamStep* step,
                            Array<float> activation_gradient, Array<double> squared_norm, Array<std::byte> workspace,
                            const LateRows& late = {});

void decode_backward_norm(const Execution&, const SparseActivations&, const FeatureHits&, AnyMatrix gradient_rows,
                          std::span<const ParameterRows> decoder, Array<float> activation_gradient,
                          Array<double> squared_norm, Array<std::byte> workspace, const LateRows& late = {});

}  // namespace weft::kernels::cuda

// SPDX-License-Identifier: Apache-2.0
//
// adam.hpp on NVIDIA GPUs, and the two planes in which fp32 weights are kept there.
#pragma once

#include "kernels/optimize/adam.hpp"

namespace weft::kernels::cuda {

void adam_rows(const Execution&, const ParameterRows& parameters, std::int64_t row_begin, Matrix<const float> gradient,
               const AdamStep* step);
void adam_vector(const Execution&, const ParameterVector& parameters, Array<const float> gradient,
                 const AdamStep* step);
void initialise_uniform(const Execution&, const ParameterRows& parameters, float bound, std::uint64_t seed,
                        Purpose purpose);
void weights_to_float(const Execution&, const ParameterRows& parameters, std::int64_t row_begin, Matrix<float> out);
void segment_norms(const Execution&, const ParameterRows& parameters, Matrix<float> out);
void flag_nonfinite(const Execution&, const ParameterRows& parameters, std::int32_t* flag);
void flag_beyond(const Execution&, AnyMatrix matrix, float largest, std::int32_t* flag);

/// Of fp32 weights only.
void weights_from_float(const Execution&, const ParameterRows& parameters, std::int64_t row_begin,
                        Matrix<const float> in);

}  // namespace weft::kernels::cuda
